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
