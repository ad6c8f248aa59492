"""``hpc demo``: one MoE layer's decode step on real request lengths, every operator held to its float64 reference.

attention over a paged cache -> projection, residual and norm (plain torch) -> router and top-k -> experts. Each
operator gets what the one before it produced.
"""

import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hpc_common.capability import capability
from hpc_common.lengths import format_lengths, parse_lengths

from . import requests, steps
from .errors import InputError
from .layer import MAX_TOKENS, QWEN3_30B_TP4, Layer, LayerShape, make_layer
from .progress import Progress
from .schedules import Comparison, compare
from .steps import Outcome

DEFAULT_REQUESTS = 32
DEFAULT_SERVICE = "conversation"


def _requests(count: int) -> str:
    return f"{count:,} request" + "s" * (count != 1)


def _check_tokens(lengths: list[int], option: str, what: str = "") -> None:
    """InputError naming ``option`` where ``lengths`` hold more tokens than the demo's batch may."""
    if sum(lengths) > MAX_TOKENS:
        got = f"{sum(lengths):,} in {_requests(len(lengths))}{what}"
        raise InputError(f"{option}: expected at most {MAX_TOKENS:,} cached tokens in all, got {got}")


@dataclass(frozen=True)
class Batch:
    """Cache lengths of a decode batch, and where they come from."""

    lengths: list[int]
    source: str

    def describe(self) -> str:
        """Number, range and sum of the lengths."""
        low, high, total = min(self.lengths), max(self.lengths), sum(self.lengths)
        span = f"{low:,} to {high:,}" if low != high else f"{low:,}"
        tokens = "cached token" if span == "1" else "cached tokens"
        return f"{_requests(len(self.lengths))} of {span} {tokens}, {total:,} in all"


def choose_batch(
    service: str | None,
    trace: pathlib.Path | None,
    lengths: str | None,
    count: int | None,
    seed: int,
) -> Batch:
    """The batch that the options ask for; at most one of service, trace and lengths. Raises InputError."""
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed: expected 0 to {2**63 - 1}, got {seed}")
    given = {"--service": service, "--trace": trace, "--lengths": lengths}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InputError(f"expected one of {', '.join(given)}, got {' and '.join(named)}")
    if lengths is not None:
        if count is not None:
            raise InputError("--requests: --lengths already says how many requests there are")
        try:
            parsed = parse_lengths(lengths, requests.MAX_LENGTH, (1, requests.MAX_REQUESTS))
        except ValueError as error:
            reason = str(error).split(": ", 2)[-1]  # without function and argument
            negative = " (no length is negative)" if "-" in lengths else ""
            raise InputError(f"--lengths: {reason}{negative}") from None
        _check_tokens(parsed, "--lengths")
        return Batch(parsed, f"lengths {format_lengths(parsed)}")
    count = DEFAULT_REQUESTS if count is None else count
    if trace is not None:
        pairs = requests.read_trace(trace)
        drawn = requests.draw_from_trace(pairs, count, seed)
        _check_tokens(drawn, "--requests", f" drawn from {trace} (--trace)")
        return Batch(drawn, f"drawn with seed {seed} from {_requests(len(pairs))} of {trace.name}")
    service = DEFAULT_SERVICE if service is None else service
    drawn = requests.draw(service, count, seed)
    _check_tokens(drawn, "--requests", f" of '{service}'")
    return Batch(drawn, f"drawn with seed {seed} from the quantiles of '{service}'")


@dataclass
class Report:
    """The demo's result. gpu: the GPU's name, "" without one; gpu_note: why there is none."""

    shape: LayerShape
    batch: Batch
    gpu: str
    gpu_note: str
    comparison: Comparison
    outcomes: list[Outcome]

    @property
    def ok(self) -> bool:
        """Whether everything that ran is within tolerance."""
        return all(outcome.ok for outcome in self.outcomes)


def find_gpu() -> tuple[torch.device | None, str, str]:
    """The GPU that the demo uses with its name, or None, "" and why there is none."""
    if not torch.cuda.is_available():
        return None, "", "no CUDA device"
    machine = capability()
    if not machine.usable:
        return None, "", f"{machine.name}: {machine.reason}"
    return torch.device(machine.device), machine.name, ""


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: of a step's many small operations a second one mostly waits, badly so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def run(batch: Batch, seed: int, progress: Progress, shape: LayerShape = QWEN3_30B_TP4) -> Report:
    """Make the layer, run the step, check everything. Raises InputError for a batch that is too large."""
    gpu, gpu_name, gpu_note = find_gpu()
    progress.phase("weights and cache", sum(batch.lengths))
    layer: Layer = make_layer(shape, batch.lengths, seed, progress.advance)
    attended, attention_out, schedule = steps.attention(layer, gpu, progress)
    x = layer.hidden_states(attention_out)
    routed, ids, weights = steps.router(layer, x, gpu, progress)
    expert = steps.experts(layer, x, ids, weights, gpu, progress)
    comparison = compare(schedule, batch.lengths)
    return Report(shape, batch, gpu_name, gpu_note, comparison, [*attended, *routed, *expert])
