"""The README's table and the plots are what figures.py makes of the results that are committed."""

from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hpc_common.testing import check_figures, load_script


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return load_script(Path(__file__).parent.parent / "benchmarks" / "figures.py", "router_figures")


def test_they_are_what_the_results_make(figures: ModuleType) -> None:
    def change(rows: list[dict]) -> None:
        next(row for row in rows if row["mode"] == "cold" and row["provider"] == "ours")["us"] *= 2

    check_figures(figures, change, ["README.md", "latency.svg"])


def test_plots_have_every_series_of_every_size(figures: ModuleType) -> None:
    for name in ("latency.svg", "error.svg"):
        root = ElementTree.parse(figures.RESULTS.with_name(name)).getroot()
        lines = [each for each in root if each.tag.endswith("polyline")]
        assert len(lines) == 3 * len(figures.SERIES)
        for line in lines:
            points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
            assert len(points) >= 9 and points == sorted(points)
            assert all(0 < x < int(root.get("width")) and 0 < y < int(root.get("height")) for x, y in points)


def test_ticks(figures: ModuleType) -> None:
    assert figures._ticks(2, 150) == [2, 5, 10, 20, 50, 100]
    assert [figures._label(tick) for tick in figures._ticks(1e-5, 0.5)] == ["1e-5", "1e-4", "1e-3", "1e-2", "1e-1"]


def test_what_three_terms_may_take(figures: ModuleType) -> None:
    """1.5 times two terms where 6 M N K / 790e12 s exceeds the read of 4 N K bytes, else 1.15."""
    assert figures.read_us(192, 4096) == pytest.approx(1.91, abs=0.01)  # 3.15 MB
    assert figures.read_us(768, 6144) == pytest.approx(4.94 + (18.87 - 16.8) / (33.6 - 16.8) * (8.8 - 4.94), abs=0.01)
    assert figures.read_us(64, 2048) == pytest.approx(1.25 - 0.33 / 2, abs=0.01)  # 0.52 MB, below the first
    assert figures.read_us(1024, 65536) < figures.read_us(1024, 131072)
    for n, k, last in ((192, 4096, 319), (384, 3072, 259), (768, 6144, 151), (256, 7168, 203), (896, 7168, 143)):
        assert (figures.allowed(last, n, k), figures.allowed(last + 2, n, k)) == (1.15, 1.5)


def test_rows_over_what_is_allowed_are_named(figures: ModuleType) -> None:
    def values(size: str, times: dict[int, float]) -> dict:
        return {size: {m: {("router-2", "ours"): 2.0, ("router-3", "ours"): 2.0 * each} for m, each in times.items()}}

    times = values("768x6144", {64: 1.1, 1024: 1.5})
    two_terms = {"896x7168": {64: {("router-2", "ours"): 1.0}}}
    line = figures.three_terms(times, two_terms)
    assert line.endswith("Over what is allowed: none.") and "2 rows above. " in line
    assert "1.10 times as long in the 1 rows" in line and "1.50 times as long in the 1 rows" in line
    line = figures.three_terms(times, {**values("768x6144", {64: 2.0}), **values("256x7168", {1: 1.16})})
    assert line.endswith("Over what is allowed: 256 x 7168, M = 1: 1.16.")  # the table's own row counts, not the other
    assert "2 rows above and 1 of `results/h200_decode.json`. " in line
    assert "768 x 6144, M = 1,024: 1.51" in figures.three_terms(values("768x6144", {64: 1.1, 1024: 1.51}), {})


def test_rows_over_cublas_are_named(figures: ModuleType) -> None:
    def row(m: int, op: str, provider: str, us: float) -> dict:
        return {"op": op, "case": f"64x2048 m={m}", "provider": provider, "mode": "cold", "us": us}

    rows = [row(m, "router-2", "ours", us) for m, us in ((1, 2.0), (64, 2.05), (128, 9.0))]
    rows += [row(m, "router-2", "cuBLAS fp32", us) for m, us in ((1, 3.0), (64, 2.02), (128, 2.0))]
    text = figures.few_tokens({"date": "2026-11-30", "rows": rows})
    assert "takes 0.99 to 1.5 times as long. More than 2 % over cuBLAS fp32: none." in text
    assert text.splitlines()[2:] == [
        "| N x K | M = 1 | M = 64 |",
        "|---|--:|--:|",
        "| 64 x 2048 | 2.0 / 3.0 | 2.0 / 2.0 |",
    ]
    rows[1]["us"] = 2.07
    text = figures.few_tokens({"date": "2026-11-30", "rows": [*rows, row(1, "linear-3", "ours", 2.5)]})
    assert "(1.20 to 1.2 times `linear`'s three terms)" in text
    assert "over cuBLAS fp32: 64 x 2048, M = 64: 1.02." in text


def test_choices_stand_beside_what_they_are_made_of(figures: ModuleType) -> None:
    names = ("ours", "scores alone", "scores, torch's softmax and topk")
    rows = [
        {"op": "route-2", "case": f"192x4096 k=8 m={m}", "provider": name, "mode": "cold", "us": us}
        for m, times in ((1, (4.0, 3.0, 18.0)), (4096, (30.0, 20.0, 75.0)))
        for name, us in zip(names, times, strict=True)
    ]
    text = figures.choices({"date": "2026-11-30", "rows": rows})
    assert "which take 2.5 to 4.5 times as long as `route`." in text
    assert text.splitlines()[2:] == [
        "| N x K, k | M = 1 | M = 4,096 |",
        "|---|--:|--:|",
        "| 192 x 4096, 8 | 4.0 / 3.0 / 18.0 | 30.0 / 20.0 / 75.0 |",
    ]
