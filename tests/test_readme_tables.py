"""The README says what is so: its status table, the packages' versions of it, and the files it points at."""

import re
from pathlib import Path

import pytest
from hpc_tools import documents, operators

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def test_status_table_is_up_to_date() -> None:
    assert not documents.update(README, operators.installed(), check=True), "run: uv run hpc docs"


def test_every_row_of_the_tables_is_in_the_readme() -> None:
    """Not by way of the generator: each operator's line says yes or no as its capability table does."""
    lines = [line for line in README.read_text().splitlines() if line.startswith("| hpc-")]
    for entry in operators.installed():
        for row in operators.support_rows(entry):
            matching = [
                cells
                for cells in ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
                if cells[0] == entry.package.distribution
                and cells[1] == f"`{row.operator}`"
                and row.feature in cells[2].split("; ")
            ]
            assert len(matching) == 1, (row.operator, row.feature)
            assert matching[0][3:5] == ["yes" if row.cpu else "no", "yes" if row.cuda else "no"]


@pytest.mark.parametrize("document", [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/README.md"))])
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    paths = set(re.findall(r"\]\((?!https?://|#)([^)#]+)", text))
    assert not [path for path in paths if not (document.parent / path).exists()]


def test_paths_of_the_map_exist() -> None:
    text = README.read_text()
    paths = re.findall(r"`((?:common|packages|tools|integration|tests|\.ci)/[^`*\s]*)`", text)
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]
