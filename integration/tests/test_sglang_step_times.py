"""benchmarks/step_times.py: a trace of SGLang's profiler, made by hand, taken apart."""

import gzip
import json
import pathlib
from types import ModuleType
from typing import Any

import pytest
from hpc_common.testing import load_script


@pytest.fixture(scope="module")
def step_times() -> ModuleType:
    return load_script(pathlib.Path(__file__).parents[1] / "benchmarks" / "step_times.py", "step_times")


def kernel(name: str, start: float, dur: float, correlation: int) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": dur, "args": {"correlation": correlation}}


def replay(start: float, correlation: int) -> list[dict[str, Any]]:
    """60 pairs: `gemm` for 10 us, then, 2 us before its end, `act` for 5 us, then 1 us of nothing: 14 us each."""
    events = []
    for pair in range(60):
        at = start + 14 * pair
        events.append(kernel("void gemm<128, 64>(Params)", at, 10, correlation))
        events.append(kernel("act", at + 8, 5, correlation))
    return events


def trace(tmp_path: pathlib.Path, replays: int) -> str:
    events = [kernel("prefill", 0, 500, 1), {"cat": "cpu_op", "name": "aten::add", "ts": 3, "dur": 2}]
    for number in range(replays):
        events += replay(1000 + 1000 * number, 10 + number)
        events.append(kernel("sample", 1000 + 1000 * number + 900, 7, 100 + number))
    path = tmp_path / "a.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events[::-1]}, file)
    return str(path)


def test_times_of_a_step_add_up(step_times: ModuleType, tmp_path: pathlib.Path) -> None:
    found = step_times.breakdown(trace(tmp_path, 5))
    assert found["steps"] == 3  # the first and the last are left out
    assert found["period_us"] == 1000
    assert found["span_us"] == 14 * 59 + 13
    assert found["outside"] == [1, 7]  # `sample`; the prefill came before
    kernels = {name: row for name, *row in found["kernels"]}
    assert kernels["gemm<128, 64>"] == [60, 10 + 59 * 11, 600]  # the gap before it is its own
    assert kernels["act"] == [60, 60 * 3, 300]  # 2 of its 5 us ran beside the GEMM
    assert sum(given for _, given, _ in kernels.values()) == found["span_us"]
    text = step_times.text(found)
    assert "replay 839 us of 120 kernels, 1.0 kernels beside it (7 us)" in text and "gemm<128, 64>" in text


def test_a_trace_without_replays_is_refused(step_times: ModuleType, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="expected replays of a CUDA graph"):
        step_times.breakdown(trace(tmp_path, 3))
