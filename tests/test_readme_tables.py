"""The README says what is so: its status table, the packages' versions of it, and the files it points at."""

import re
from pathlib import Path

import pytest
from hpc_common import schedule
from hpc_tools import demo, documents, operators, schedules

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MEMBERS = ("common", "integration", "tools", "packages/hpc-attention", "packages/hpc-router-gemm", "packages/hpc-moe")
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *(ROOT / member / "README.md" for member in MEMBERS)]


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    paths = set(re.findall(r"\]\((?!https?://|#)([^)#]+)", text))
    assert document != README or len(paths) > 20
    assert not [path for path in paths if not (document.parent / path).exists()]


def test_the_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """One operator alone: the packages' READMEs have tests of their own."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == (4, 256) and bool(names["out"].isfinite().all())
    assert capsys.readouterr().out == "True\n"


def test_schedule_in_the_readme_is_the_demos() -> None:
    """The excerpt's figures, against the schedule of the demo's default batch."""
    batch = demo.choose_batch(None, None, None, None, 0)
    comparison = schedules.compare(schedule.plan_decode(batch.lengths), batch.lengths)
    excerpt = README.read_text().split("Schedule: ")[1].split("```")[0]
    counts = [f"{comparison.total_tiles} tiles", f"{comparison.num_ctas} CTAs", f"at least {comparison.lower_bound} "]
    assert all(count in excerpt.splitlines()[0] for count in counts)
    rows = [line.strip() for line in excerpt.splitlines()[2:] if line.strip()][1:]
    for row, wanted in zip(rows, comparison.schedules, strict=True):
        name, *figures = re.split(r"\s{2,}", row)
        ratio = wanted.largest / comparison.lower_bound
        assert name == wanted.name
        assert figures == [str(wanted.used), str(wanted.pieces), str(wanted.empty), str(wanted.largest)] + [
            f"{wanted.mean:.1f}",
            f"{ratio:.2f}",
        ]


def test_code_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102
    assert names["out"].shape == names["x"].shape and bool(names["out"].isfinite().all())
    assert capsys.readouterr().out == "True\n"
