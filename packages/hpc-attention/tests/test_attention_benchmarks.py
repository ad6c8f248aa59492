"""The benchmarks of this package start: their modules import, and their cases are made. Times need a GPU."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def test_every_benchmark_imports() -> None:
    code = "import decode, decode_peers, device_check, plan; print(len(decode.tables()), len(decode.sweeps()) > 60)"
    result = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == "24 True"
