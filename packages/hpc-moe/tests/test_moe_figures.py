"""The README's table and the plot are what figures.py makes of the results that are committed."""

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

    check_figures(figures, change, ["README.md", "latency.svg"])


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
