"""The README's table and the plot are what figures.py makes of the results that are committed."""

import importlib.util
import json
import pathlib
from types import ModuleType
from xml.etree import ElementTree

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks" / "figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sglang_figures", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_are_up_to_date(figures: ModuleType) -> None:
    assert figures.main(["--check"]) == 0


def test_other_results_give_other_files(figures: ModuleType) -> None:
    document = json.loads(figures.RESULTS.read_text())
    readme = figures.README.read_text()
    before = figures.outputs(document, readme)
    next(entry for entry in document["rows"] if "step_ms" in entry)["step_ms"] *= 2
    after = figures.outputs(document, readme)
    assert [path.name for path in before if before[path] != after[path]] == ["README.md", "tpot.svg"]
    with pytest.raises(ValueError, match="once each"):
        figures.outputs(document, readme.replace(figures.END, ""))


def test_the_plot_has_every_row_of_both_backends(figures: ModuleType) -> None:
    rows = figures.measured(json.loads(figures.RESULTS.read_text()), "step_ms")
    root = ElementTree.parse(figures.RESULTS.with_name("tpot.svg")).getroot()
    bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("width") == str(figures.BAR - 3)]
    assert len(rows) >= 6 and len(bars) == 2 * len(rows)
