"""The README's tables are what figures.py makes of the committed results; sweeps become a plot."""

from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hpc_common.generated import RESULTS_BEGIN, RESULTS_END
from hpc_common.testing import check_figures, load_script


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return load_script(Path(__file__).parent.parent / "benchmarks" / "figures.py", "attention_figures")


def test_they_are_what_the_results_make(figures: ModuleType) -> None:
    def change(rows: list[dict]) -> None:
        rows[0]["us"] *= 2

    check_figures(figures, change, ["README.md"])


def test_a_peer_has_a_column_and_sweeps_have_a_panel_each(figures: ModuleType) -> None:
    def row(op: str, case: str, us: float, provider: str = "ours") -> dict:
        return {"op": op, "case": case, "provider": provider, "mode": "cold", "us": us}

    rows = [row("decode-e4m3-8/1", "1x4K", 2.0), row("decode-e4m3-8/1", "1x4K", 2.5, "ours, plan/48")]
    rows += [row("decode-e4m3-8/1", "1x4K", 9.9, "FlashInfer"), row("skew-e4m3", "64x4K", 20.0)]
    rows += [row("decode-e4m3-8/1", "1x32K", 7.0)]  # what is missing is an empty cell
    rows += [row(f"tokens-{kind}", f"{n}K", n + 1.0) for kind in ("e4m3", "bf16") for n in (8, 16, 32)]
    rows += [row("q_len-e4m3", f"{n}", 20.0 + n) for n in (1, 2, 4)]
    document = {"device": "a GPU", "date": "2026-01-01", "rows": rows}
    found = figures.outputs(document, f"x\n{RESULTS_BEGIN}\n{RESULTS_END}\ny\n")
    text = found[figures.README]
    assert (
        "| 1x4K | 1.2 | 2.0 | 2.5 | 0.42 | 9.9 |" in text and "FlashInfer" in text and "`skew-e4m3`: 64x4K 20.0" in text
    )
    assert "| 1x32K | 3.0 | 7.0 |  |  |  |" in text
    root = ElementTree.fromstring(found[figures.RESULTS.with_name("scaling.svg")])
    lines = [each.get("points").split() for each in root.iter() if each.tag.endswith("polyline")]
    assert [len(points) for points in lines] == [3, 3, 3]
    heights = [[float(point.split(",")[1]) for point in points] for points in lines]
    assert all(each == sorted(each, reverse=True) for each in heights)  # more work is higher up
