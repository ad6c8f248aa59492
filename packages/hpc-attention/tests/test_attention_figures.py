"""The README's tables are what figures.py makes of the committed results; sweeps become a plot."""

import importlib.util
import json
import pathlib
from types import ModuleType
from xml.etree import ElementTree

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks" / "figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_figures", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_are_up_to_date(figures: ModuleType) -> None:
    assert figures.main(["--check"]) == 0


def test_other_results_give_other_tables(figures: ModuleType) -> None:
    document = json.loads(figures.RESULTS.read_text())
    readme = figures.README.read_text()
    before = figures.outputs(document, readme)[figures.README]
    document["rows"][0]["us"] *= 2
    assert figures.outputs(document, readme)[figures.README] != before
    with pytest.raises(ValueError, match="once each"):
        figures.outputs(document, readme.replace(figures.END, ""))


def test_a_peer_has_a_column_and_sweeps_have_a_panel_each(figures: ModuleType) -> None:
    def row(op: str, case: str, us: float, provider: str = "ours") -> dict:
        return {"op": op, "case": case, "provider": provider, "mode": "cold", "us": us}

    rows = [row("decode-e4m3-8/1", "1x4K", 2.0), row("decode-e4m3-8/1", "1x4K", 2.5, "ours, plan/48")]
    rows += [row("decode-e4m3-8/1", "1x4K", 9.9, "FlashInfer"), row("skew-e4m3", "64x4K", 20.0)]
    rows += [row(f"tokens-{kind}", f"{n}K", n + 1.0) for kind in ("e4m3", "bf16") for n in (8, 16, 32)]
    rows += [row("q_len-e4m3", f"{n}", 20.0 + n) for n in (1, 2, 4)]
    document = {"device": "a GPU", "date": "2026-01-01", "rows": rows}
    found = figures.outputs(document, f"x\n{figures.BEGIN}\n{figures.END}\ny\n")
    text = found[figures.README]
    assert (
        "| 1x4K | 1.2 | 2.0 | 2.5 | 0.42 | 9.9 |" in text and "FlashInfer" in text and "`skew-e4m3`: 64x4K 20.0" in text
    )
    root = ElementTree.fromstring(found[figures.RESULTS.with_name("scaling.svg")])
    lines = [each.get("points").split() for each in root.iter() if each.tag.endswith("polyline")]
    assert [len(points) for points in lines] == [3, 3, 3]
    heights = [[float(point.split(",")[1]) for point in points] for points in lines]
    assert all(each == sorted(each, reverse=True) for each in heights)  # more work is higher up
