"""The README's table and the plot are what figures.py makes of the results that are committed."""

import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hpc_common.testing import check_figures, load_script


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return load_script(Path(__file__).parent.parent / "benchmarks" / "figures.py", "sglang_figures")


def test_they_are_what_the_results_make(figures: ModuleType) -> None:
    def change(rows: list[dict]) -> None:
        next(row for row in rows if "step_ms" in row)["step_ms"] *= 2

    check_figures(figures, change, ["README.md", "tpot.svg"])


def test_the_plot_has_every_row_of_both_backends(figures: ModuleType) -> None:
    rows = figures.measured(json.loads(figures.RESULTS.read_text()), "step_ms")
    root = ElementTree.parse(figures.RESULTS.with_name("tpot.svg")).getroot()
    bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("width") == str(figures.BAR - 3)]
    assert len(rows) >= 6 and len(bars) == 2 * len(rows)
