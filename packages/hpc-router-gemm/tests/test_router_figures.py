"""The README's table and the plots are what figures.py makes of the results that are committed."""

import importlib.util
import json
import pathlib
from types import ModuleType
from xml.etree import ElementTree

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks" / "figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("router_figures", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_are_up_to_date(figures: ModuleType) -> None:
    assert figures.main(["--check"]) == 0


def test_other_results_give_other_files(figures: ModuleType) -> None:
    document = json.loads(figures.RESULTS.read_text())
    readme = figures.README.read_text()
    before = figures.outputs(document, readme)
    row = next(each for each in document["rows"] if each["mode"] == "cold" and each["provider"] == "ours")
    row["us"] *= 2
    after = figures.outputs(document, readme)
    assert [path.name for path in before if before[path] != after[path]] == ["README.md", "latency.svg"]
    with pytest.raises(ValueError, match="once each"):
        figures.outputs(document, readme.replace(figures.END, ""))


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
