"""The README's and DESIGN.md's tables and the plot are what figures.py makes of the results that are committed."""

import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hpc_common.testing import check_figures, load_script


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return load_script(Path(__file__).parent.parent / "benchmarks" / "figures.py", "moe_figures")


def test_they_are_what_the_results_make(figures: ModuleType) -> None:
    def change(rows: list[dict]) -> None:
        rows[3]["us"] *= 2

    check_figures(figures, change, ["README.md", "latency.svg", "DESIGN.md"])


def test_the_plot_has_every_series_of_every_layer(figures: ModuleType) -> None:
    root = ElementTree.parse(figures.RESULTS.with_name("latency.svg")).getroot()
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == len(figures.SHAPES) * len(figures.SERIES)


def test_floors(figures: ModuleType) -> None:
    """8 experts of 2.36 MB for one token of hy3-tp8; all of them, or the arithmetic, for many."""
    shape = figures.SHAPES["hy3-tp8"]
    assert figures.floor_of(shape, 1) == pytest.approx(5.5, abs=0.1)
    assert figures.floor_of(shape, 512) == pytest.approx(100.3, abs=0.3)
    assert figures.floor_of(shape, 8192) == pytest.approx(237.9, abs=0.3)


def test_cells(figures: ModuleType) -> None:
    """Numbers of rows that are there, differences and ratios; a line a case, by tokens."""
    rows = [("A", "ours", 3.0), ("A", "peer", 4.5), ("B", "ours", 2.25)]
    document = {"rows": [{"op": op, "case": "x m=1024", "provider": who, "us": us} for op, who, us in rows]}
    document["rows"].append({"op": "A", "case": "x m=2", "provider": "ours", "us": 1.0, "kernels": 4})
    columns = [("a", figures.of("A")), ("b", figures.of("B")), ("kernels", figures.of("A", "ours", "kernels"))]
    assert figures.grid(figures.by_case(document), columns[::2])[2:] == [
        "| x | 2 | 1.0 | 4 |",
        "| x | 1,024 | 3.0 |  |",
        "",
    ]
    cells = figures.by_case(document)["x m=1024"]
    assert figures.of("B", "peer")(cells) == "" and figures.of("A", "peer")(cells) == "4.5"
    assert figures.compared("A", "peer", "ours")(cells) == "+1.5"
    assert figures.compared("A", "peer", "ours", times=True)(cells) == "1.50"
    assert figures.compared("B", "peer", "ours")(cells) == ""
    hot = {"op": "A", "case": "x m=2", "provider": "ours", "mode": "hot", "us": 0.5}
    assert figures.by_case({"rows": [*document["rows"], hot]}) == figures.by_case(document)


def test_against_the_best_public(figures: ModuleType) -> None:
    """The faster of two in each row; cases that nobody else was measured in do not count."""
    rows = [("hy3-tp8 m=1", 10.0), ("hy3-ep8 m=4", 212.2), ("other m=1", 1.0)]  # 27.58 of 32.37, 106.1 of 120.1
    document = {"rows": [{"op": "moe-block", "case": case, "provider": "ours", "us": us} for case, us in rows]}
    gains = figures.beside_public(document, "moe-block")
    assert gains == pytest.approx({"hy3-tp8 m=1": 2.758, "hy3-ep8 m=4": 0.5}, rel=1e-3)
    assert figures.mean(gains) == pytest.approx((2.758 * 0.5) ** 0.5, rel=1e-3)


def test_rows_without_their_partner_are_left_out(figures: ModuleType) -> None:
    """Whatever single row a run lacks, its tables can be made."""
    for _, name, make in figures.DESIGN_TABLES:
        path = figures.RESULTS.with_name(f"{name}.json")
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        for gone in range(len(rows)):
            assert make({"rows": rows[:gone] + rows[gone + 1 :]})


def test_launches(figures: ModuleType) -> None:
    """What is said of calls of few tokens is of those alone."""
    us = {("moe-tensor", 8): (3.0, 5.5), ("moe-block", 8): (4.0, 5.0), ("moe-block", 512): (7.0, 99.0)}
    rows = [
        {"op": op, "case": f"x m={tokens}", "provider": who, "us": time, "kernels": tokens // 4, "kernels_bf16_x": 4}
        for (op, tokens), times in us.items()
        for who, time in zip(("ours", "ours without PDL"), times, strict=True)
    ]
    lines = figures.launches({"rows": rows})
    assert lines[2:4] == [
        "| x | 8 | 2 | 4 | 3.0 | 5.5 | 2 | 4 | 4.0 | 5.0 |",
        "| x | 512 |  |  |  |  | 128 | 4 | 7.0 | 99.0 |",
    ]
    assert lines[-1] == "To 256 tokens at most 4 kernels (4 asked); without PDL 1.0 to 2.5 us more."
