"""benchmarks/by_turns.py: builds beside each other, here two that differ by an environment variable."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "by_turns.py"
CASES = """
import os, time

def cases():
    slow = os.environ.get("SLOW") == "1"

    def pause():
        time.sleep(0.004 if slow else 0.001)

    def broken():
        if slow:
            raise RuntimeError("no such tile")

    return {
        "same": lambda: ([pause, pause], lambda: "1.5"),
        "other": lambda: ([pause], lambda: "wrong" if slow else "right"),
        "broken": lambda: ([broken], None),
    }
"""


def test_builds_take_turns_and_what_differs_is_said(tmp_path: Path) -> None:
    cases = tmp_path / "cases.py"
    cases.write_text(CASES)
    path = os.pathsep.join(sys.path)  # both builds are this environment's
    command = [sys.executable, SCRIPT, cases, f"fast={path},SLOW=0", f"slow={path},SLOW=1", "--rounds", "3"]
    run = subprocess.run([*command, "--replays", "2"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].split() == ["fast", "slow"]
    for name, line in zip(("same", "other"), (lines[1], lines[2]), strict=True):
        case, fast, none, slow, more = line.split()
        assert case == name and float(none) == 0
        assert 1000 <= float(fast) < float(slow) and float(slow) >= 4000
        assert abs(float(slow) - float(fast) - float(more)) < 0.02
    assert lines[3].split() == ["slow:", "wrong,", "fast:", "right"]
    assert lines[4].startswith("broken")
    assert lines[5].split() == ["slow:", "RuntimeError:", "no", "such", "tile"] and len(lines) == 6
