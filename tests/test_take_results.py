""".ci/take_results.py: what is joined is of one device, day and build."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parent.parent / ".ci/take_results.py"
spec = importlib.util.spec_from_file_location("take_results", PATH)
take_results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(take_results)

HEAD = {"device": "NVIDIA H200", "date": "2026-11-30", "build": {"hpc_attention": {"git": "c7cb673"}}}


def document(command: str, *rows: dict, **changed: object) -> dict:
    return {**HEAD, **changed, "command": command, "rows": list(rows)}


def test_rows_and_commands_follow_each_other() -> None:
    joined = take_results.join([document("decode.py", {"us": 1}, {"us": 2}), document("plan.py", {"us": 3})])
    assert joined == document("decode.py; plan.py", {"us": 1}, {"us": 2}, {"us": 3})


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "NVIDIA H100"},
        {"date": "2026-12-01"},
        {"build": {"hpc_attention": {"git": "8aa31e5"}}},
        {"note": "x"},
    ],
)
def test_files_of_two_builds_are_not_joined(changed: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(changed))):
        take_results.join([document("decode.py"), document("plan.py", **changed)])


def test_every_committed_results_file_can_be_written() -> None:
    root = PATH.parent.parent
    committed = {str(path.relative_to(root)) for path in root.glob("*/**/benchmarks/results/*.json")}
    assert committed and committed <= set(take_results.FILES)
