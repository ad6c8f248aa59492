"""Timing one operator beside its peers, the same way everywhere.

What is measured is a decode step's situation. Every buffer set of a candidate is one layer's buffers, and one pass
calls all sets once, in order. ``cold`` passes rotate over enough sets that the bytes between two uses of a buffer
exceed the L2 cache, as the layers of a model do; ``hot`` passes use the first set alone. On a GPU a pass is one CUDA
graph, so that neither Python nor launch overhead is timed; on a CPU it is a plain loop under ``time.perf_counter``.
Candidates of one call take turns within each round, so that a clock that drifts meets all of them, and each reports
its median over rounds.

A replay takes the host 5 us, so a graph of one short kernel would be timed by how fast the host replays it. Each round
begins with a delay on the GPU, behind which its replays queue.

Another process on the same GPU takes turns with this one, and every time doubles. So before and after the rounds a
``Clock`` is asked whether it is alone (on a GPU: whether a fixed stream over 64 MB takes what it took at best), and
rounds beside company are measured again.

Results are rows ``{"op", "case", "provider", "mode", "us"}`` in a JSON file that also states device, date, command and
build; ``write_results`` makes it.
"""

import datetime
import json
import math
import pathlib
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from .capability import capability
from .checks import fail

# Streaming reads on one NVIDIA H200, cold, by a kernel that does nothing else: (megabytes, microseconds). Beyond the
# last point T = 1.35 us + MB / 4.58 (MB per us). The first point is an empty kernel of 132 CTAs in a graph.
_STREAM_POINTS = ((0.0, 0.59), (1.05, 1.25), (3.15, 1.91), (8.39, 3.04), (16.8, 4.95))
_STREAM_OFFSET_US, _STREAM_MB_PER_US = 1.35, 4.58
EMPTY_KERNEL_US = 0.59
# Matrix rates that the floors assume, in operations per microsecond.
_MATRIX_RATE = {torch.bfloat16: 790e6, torch.float16: 790e6, torch.float8_e4m3fn: 1300e6}

COLD_BYTES = 201e6  # between two uses of a buffer: more than three times the 60 MB L2

# The GPU's delay before a round, in its clock's cycles for each replay: 10 us at 1.98 GHz, twice what the host takes.
HEAD_START_CYCLES = 20_000

ATTEMPTS, PAUSE_SECONDS = 4, 2.0  # how often rounds beside company are measured, and what lies between
COMPANY = 1.3  # a fixed stream that takes so many times its best has company: another process makes it 2 or more
_PROBE_BYTES, _PROBE_CALLS, _PROBE_REPLAYS = 1 << 26, 16, 20  # some 10 ms: longer than a process's turn
_probes: dict[torch.device, tuple[Callable[[], Any], float]] = {}  # the stream's graph and its least seconds so far


def floor_us(num_bytes: float, operations: float = 0, dtype: torch.dtype = torch.bfloat16) -> float:
    """Least time on one H200 in microseconds: reading ``num_bytes`` once, or the arithmetic, whichever is larger.

    Args:
        num_bytes: bytes that must be read, cold.
        operations: multiplications plus additions on the tensor cores (2 M N K for a product).
        dtype: their type: bf16 and fp16 at 790 TFLOP/s, e4m3 at 1.3 PFLOP/s.
    """
    if num_bytes < 0 or operations < 0:
        fail("hpc_common.floor_us", "num_bytes, operations", "none negative", f"{num_bytes}, {operations}")
    if dtype not in _MATRIX_RATE:
        fail("hpc_common.floor_us", "dtype", " or ".join(map(str, _MATRIX_RATE)), dtype)
    megabytes = num_bytes / 1e6
    stream = _STREAM_OFFSET_US + megabytes / _STREAM_MB_PER_US
    for (x0, y0), (x1, y1) in zip(_STREAM_POINTS, _STREAM_POINTS[1:], strict=False):
        if megabytes <= x1:
            stream = y0 + (y1 - y0) * (megabytes - x0) / (x1 - x0)
            break
    return max(stream, operations / _MATRIX_RATE[dtype])


def buffer_sets(bytes_per_set: float, most: int = 24) -> int:
    """How many buffer sets a cold measurement rotates over: max(2, ceil(201 MB / bytes) + 1), at most ``most``."""
    if bytes_per_set <= 0 or most < 1:
        fail("hpc_common.buffer_sets", "bytes_per_set, most", "both positive", f"{bytes_per_set}, {most}")
    return min(most, max(2, math.ceil(COLD_BYTES / bytes_per_set) + 1))


@dataclass(frozen=True)
class Candidate:
    """What one row of results measures.

    op, case: named as in the tables. provider: "ours" or the peer's name. calls: one function without arguments for
    each buffer set, in the order of the layers; on a GPU each must be capturable in a CUDA graph.
    """

    op: str
    case: str
    provider: str
    calls: Sequence[Callable[[], Any]]


@dataclass(frozen=True)
class Row:
    """One result. mode: "cold" or "hot". us: microseconds a call, the median over rounds."""

    op: str
    case: str
    provider: str
    mode: str
    us: float


class Clock(Protocol):
    """How passes are prepared and timed; a test may hand in its own."""

    def prepare(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """A function that runs one pass: every call once, in order. Runs the calls at least once to warm them up."""

    def seconds(self, one_pass: Callable[[], Any], repeats: int) -> float:
        """Seconds that ``repeats`` passes take together."""

    def alone(self) -> bool:
        """Whether nothing else is seen to use the device now."""


class CpuClock:
    """``time.perf_counter`` around plain calls."""

    def prepare(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
        def one_pass() -> None:
            for call in calls:
                call()

        one_pass()
        return one_pass

    def seconds(self, one_pass: Callable[[], Any], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            one_pass()
        return time.perf_counter() - start

    def alone(self) -> bool:
        return True  # not looked for: the median of rounds has to do


class GraphClock:
    """CUDA graph replay on one device, timed with CUDA events around the replays of a round."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            fail("hpc_common.GraphClock", "device", "a CUDA device", device)

    def prepare(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            # Warm up off the default stream, as capture asks: lazy module loading and allocations happen here.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    for call in calls:
                        call()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            graph.replay()
            torch.cuda.synchronize()

        def one_pass(calls: Sequence[Callable[[], Any]] = calls) -> None:  # which hold the memory that the graph uses
            graph.replay()

        return one_pass

    def seconds(self, one_pass: Callable[[], Any], repeats: int) -> float:
        with torch.cuda.device(self._device):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            one_pass()  # the first replay after another graph pays for its upload
            torch.cuda._sleep(HEAD_START_CYCLES * repeats)
            start.record()
            for _ in range(repeats):
                one_pass()
            stop.record()
            stop.synchronize()
            return start.elapsed_time(stop) * 1e-3

    def alone(self) -> bool:
        """Company that was there at the first call and has not left since is not noticed: no better time is known."""
        if self._device not in _probes:
            buffer = torch.zeros(_PROBE_BYTES // 4, device=self._device)
            _probes[self._device] = self.prepare([lambda: buffer.add_(1.0)] * _PROBE_CALLS), math.inf
        one_pass, least = _probes[self._device]
        # Of three, for a GPU that was idle raises its clock during the first.
        now = min(self.seconds(one_pass, _PROBE_REPLAYS) for _ in range(3))
        _probes[self._device] = one_pass, min(least, now)
        return now <= COMPANY * least


def measure(
    candidates: Sequence[Candidate],
    mode: str = "cold",
    replays: int = 10,
    rounds: int = 7,
    device: torch.device | str | None = None,
    clock: Clock | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Measure candidates beside each other and return one row each, in their order.

    Args:
        candidates: what to measure; those of one call are interleaved, so peers belong in one call.
        mode: "cold" (a pass calls every buffer set once) or "hot" (a pass calls the first set as many times).
        replays: passes a round. rounds: rounds, whose median is reported.
        device: where the candidates run; default the current GPU where there is one, else the CPU.
        clock: overrides the clock that ``device`` implies.
        progress: called with (rounds done, rounds) after every round.

    Rounds before or after which the clock is not alone are measured again, up to four times in all, 2 s apart; the
    last ones stand, with a RuntimeWarning. Raises ValueError for an unknown mode, counts under 1, or a candidate
    without calls.
    """
    where = "hpc_common.measure"
    if mode not in ("cold", "hot"):
        fail(where, "mode", '"cold" or "hot"', repr(mode))
    if replays < 1 or rounds < 1:
        fail(where, "replays, rounds", "at least 1", f"{replays}, {rounds}")
    for candidate in candidates:
        if not candidate.calls:
            fail(where, "candidates", "at least one call each", f"none in {candidate.op} {candidate.case}")
    if clock is None:
        machine = torch.device(capability(device).device)
        clock = GraphClock(machine) if machine.type == "cuda" else CpuClock()
    passes = []
    for candidate in candidates:
        calls = list(candidate.calls) if mode == "cold" else [candidate.calls[0]] * len(candidate.calls)
        passes.append((clock.prepare(calls), len(calls)))
    for attempt in range(ATTEMPTS):
        alone = clock.alone()
        times = _rounds(clock, passes, replays, rounds, progress)
        if alone and clock.alone():
            break
        if attempt + 1 < ATTEMPTS:
            time.sleep(PAUSE_SECONDS)
    else:
        cases = ", ".join(sorted({f"{candidate.op} {candidate.case}" for candidate in candidates}))
        warnings.warn(f"{where}: something else used the device during {cases}", RuntimeWarning, stacklevel=2)
    return [
        Row(candidate.op, candidate.case, candidate.provider, mode, statistics.median(values))
        for candidate, values in zip(candidates, times, strict=True)
    ]


def _rounds(
    clock: Clock,
    passes: Sequence[tuple[Callable[[], Any], int]],
    replays: int,
    rounds: int,
    progress: Callable[[int, int], None] | None,
) -> list[list[float]]:
    """Microseconds a call in every round, for each (pass, calls in it)."""
    times: list[list[float]] = [[] for _ in passes]
    for number in range(rounds):
        # Each round starts with another candidate, so that none always runs behind the same neighbour.
        for index in range(len(passes)):
            index = (index + number) % len(passes)
            one_pass, calls_a_pass = passes[index]
            times[index].append(clock.seconds(one_pass, replays) * 1e6 / (replays * calls_a_pass))
        if progress is not None:
            progress(number + 1, rounds)
    return times


def results(
    rows: Sequence[Row],
    build: Mapping[str, Any],
    device: torch.device | str | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Rows with what they were measured on, ready for JSON.

    Args:
        rows: from ``measure``. build: what was measured, e.g. each operator's ``_C.build_info()``.
        device: default as in ``measure``. command: default this process's arguments, the program by its name alone.
    """
    argv = list(sys.argv if command is None else command)
    if argv:
        argv[0] = pathlib.Path(argv[0]).name
    return {
        "device": capability(device).name,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(argv),
        "build": dict(build),
        "rows": [asdict(row) for row in rows],
    }


def write_results(path: pathlib.Path | str, document: Mapping[str, Any]) -> None:
    """Write ``results(...)`` as JSON, one row a line, so that a new measurement reads as a small difference."""
    head = {key: value for key, value in document.items() if key != "rows"}
    rows = ",\n".join("  " + json.dumps(row) for row in document["rows"])
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + rows + "\n ]\n}\n"
    pathlib.Path(path).write_text(text)
