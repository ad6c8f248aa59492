"""tests/sanitizer/summary.py: what a sanitizer says decides, but for reports known to be none."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sanitizer" / "summary.py"
CALLS = "   0 0123abcd   0.10 {}\n   1 89abcdef   0.20 {}\nend\n"
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
GATE_UP = "hpc::moe::gate_up_kernel<(hpc::moe::Quant){}, (bool)0, (int)32>(CUtensorMap_st, hpc::moe::GemmParams)+0x2be0"


def race(kernel: str) -> str:
    return (
        f"========= Error: Race reported between Read access at void {kernel}\n========= RACECHECK SUMMARY: 1 hazard\n"
    )


def summary(
    folder: Path, log: str, calls: str = CALLS, tools: tuple[str, ...] = (), alone: str = CALLS
) -> subprocess.CompletedProcess:
    (folder / "base.moe.0.txt").write_text(alone)
    (folder / "racecheck.moe.0.txt").write_text(calls)
    (folder / "racecheck.moe.0.log").write_text(log)
    return subprocess.run([sys.executable, SCRIPT, folder, *tools], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("log", "calls", "code", "said"),
    [
        (CLEAN, CALLS, 0, "2 of 2 cases, 0 with other bits"),
        (race(GATE_UP.format(1)), CALLS, 0, "named barriers of halves"),
        (race(GATE_UP.format(2)), CALLS, 1, "gate_up_kernel<2, 0, 32>"),
        (race("hpc::moe::down_tokens_kernel<(bool)0>(int)+0x10"), CALLS, 0, "one lane arrives for its warp"),
        (race("hpc::moe::reduce_kernel(int)+0x10"), CALLS, 1, "reduce_kernel"),
        ("".join(race(f"hpc::moe::a{i}_kernel(int)+0x1") for i in range(20)), CALLS, 1, "a19_kernel"),
        (CLEAN, CALLS.replace("89abcdef", "89abcdee"), 1, "1 with other bits"),
        (CLEAN, CALLS.removesuffix("end\n"), 1, "ended early"),
        (CLEAN, CALLS.replace("end", "FAILED 2 {}: launch failed"), 1, "launch failed"),
        ("", CALLS, 1, "no summary"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, log: str, calls: str, code: int, said: str) -> None:
    found = summary(tmp_path, log, calls)
    assert found.returncode == code and said in found.stdout, found.stdout


def test_a_tool_that_did_not_begin(tmp_path: Path) -> None:
    assert summary(tmp_path, CLEAN, tools=("racecheck",)).returncode == 0
    found = summary(tmp_path, CLEAN, tools=("racecheck", "memcheck"))
    assert found.returncode == 1 and "memcheck  moe        not begun" in found.stdout


def test_calls_alone_that_ended_early(tmp_path: Path) -> None:
    """Wrong, but no other bits: there is nothing to compare with."""
    found = summary(tmp_path, CLEAN, alone=CALLS.split("\n")[0] + "\n")
    assert found.returncode == 1 and found.stdout.startswith("ended early: base.moe.0.txt\n")
    assert "2 of 1 cases, 0 with other bits" in found.stdout
