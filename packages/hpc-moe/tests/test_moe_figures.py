"""The README's table and the plot are what figures.py makes of the results that are committed."""

import importlib.util
import json
import pathlib
from types import ModuleType
from xml.etree import ElementTree

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks" / "figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("moe_figures", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_are_up_to_date(figures: ModuleType) -> None:
    assert figures.main(["--check"]) == 0


def test_other_results_give_other_files(figures: ModuleType) -> None:
    document = json.loads(figures.RESULTS.read_text())
    readme = figures.README.read_text()
    before = figures.outputs(document, readme)
    document["rows"][3]["us"] *= 2
    after = figures.outputs(document, readme)
    assert [path.name for path in before if before[path] != after[path]] == ["README.md", "latency.svg"]
    with pytest.raises(ValueError, match="once each"):
        figures.outputs(document, readme.replace(figures.END, ""))


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
