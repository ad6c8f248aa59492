"""The README's status table: made from capability tables, put between its markers and nowhere else."""

import pathlib

import pytest
from hpc_common.capability import Support
from hpc_tools import documents
from hpc_tools.documents import BEGIN, END, status_table, update, with_table
from hpc_tools.errors import InputError
from hpc_tools.operators import PACKAGES, Installed

ROWS = (
    Support("run", "bf16", note="no GPU kernel yet"),
    Support("run", "fp16", cuda=True),
    Support("run", "a|b", note="no GPU kernel yet"),
    Support("walk", "bf16", cpu=False, cuda=True, note="GPU only"),
)


def test_rows_of_one_status_are_one_line() -> None:
    assert status_table({"hpc-x": ROWS}).splitlines()[2:] == [
        "| hpc-x | `run` | bf16; a\\|b | yes | no | no GPU kernel yet |",
        "| hpc-x | `run` | fp16 | yes | yes |  |",
        "| hpc-x | `walk` | bf16 | no | yes | GPU only |",
    ]


def test_only_what_is_between_the_markers_changes() -> None:
    text = f"head\n{BEGIN}\nold\n{END}\ntail\n"
    assert with_table(text, "new") == f"head\n{BEGIN}\nnew\n{END}\ntail\n"
    assert with_table(with_table(text, "new"), "new") == with_table(text, "new")


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_missing_markers(text: str) -> None:
    with pytest.raises(InputError, match="once each"):
        with_table(text, "new")


def test_update_and_check(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "support_rows", lambda entry: ROWS)
    packages = [Installed(package, "1.0", {}, "") for package in PACKAGES]
    file = tmp_path / "README.md"
    file.write_text(f"{BEGIN}\n{END}\n")
    assert update(file, packages, check=True) and file.read_text() == f"{BEGIN}\n{END}\n"
    assert update(file, packages)
    assert file.read_text().count("`walk`") == len(PACKAGES)
    assert not update(file, packages) and not update(file, packages, check=True)
    with pytest.raises(InputError, match="hpc-moe is not installed"):
        update(file, [*packages[:2], Installed(PACKAGES[2], None, {}, "")])
    with pytest.raises(InputError, match="No such file"):
        update(tmp_path / "none.md", packages)
