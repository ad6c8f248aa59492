"""The demo's operators, one function each: where it runs, one call, its checks, and on a GPU its time beside the floor.

An operator runs on the GPU where its own capability table says that it has a kernel for the problem, else on CPU copies
of its inputs. One that is not installed is named, and what follows gets the reference's result in its place.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hpc_common import timing
from hpc_common.reference import attention as attention_reference
from hpc_common.reference import moe as moe_reference
from hpc_common.reference import router as router_reference
from hpc_common.schedule import DecodeSchedule, plan_decode

from . import checks, operators
from .checks import Check
from .layer import FP8, Layer
from .progress import Progress

HOST = torch.device("cpu")
CTAS_WITHOUT_GPU = 132  # an H200's SMs: what the schedule is made for where there is neither a GPU nor hpc-attention
TERMS = 2  # bf16 terms of the router's fp32 weight


@dataclass
class Outcome:
    """What became of one operator.

    device: where it ran, "" where it did not. note: why not on the GPU, or why not at all. milliseconds: this first
    call by the wall clock, on a CPU. microseconds, floor: a cold call by graph replay, on a GPU, and the least time
    that reading its inputs or its arithmetic takes there.
    """

    operator: str
    device: str = ""
    note: str = ""
    result: str = ""
    checks: list[Check] = field(default_factory=list)
    milliseconds: float | None = None
    microseconds: float | None = None
    floor: float | None = None

    @property
    def ok(self) -> bool:
        """Whether every check passed; an operator that is not installed has none."""
        return all(check.ok for check in self.checks)


def _call(
    operator: str,
    gpu: torch.device | None,
    refusal: str,
    make: Callable[..., Callable[[], Any]],
    tensors: Sequence[torch.Tensor],
    cold_bytes: float,
    floor: float,
) -> tuple[Any, Outcome]:
    """One call of an operator where it runs, timed.

    Args:
        refusal: why the operator does not run this on the GPU; "" where it does.
        make: from tensors on one device to the call without arguments; called once for each buffer set.
        tensors: the inputs, on the CPU. cold_bytes: what a call reads of them. floor: its least time in microseconds.
    """
    device, note = (gpu, "") if gpu is not None and not refusal else (HOST, refusal and f"CPU copies: {refusal}")
    call = make(*(tensor.to(device) for tensor in tensors))
    start = time.perf_counter()
    result = call()
    outcome = Outcome(operator, str(device), note)
    if device.type == "cpu":
        outcome.milliseconds = 1e3 * (time.perf_counter() - start)
        return result, outcome
    sets = timing.buffer_sets(cold_bytes) if cold_bytes else 1
    calls = [call] + [make(*(tensor.to(device, copy=True) for tensor in tensors)) for _ in range(sets - 1)]
    (row,) = timing.measure([timing.Candidate(operator, "demo", "ours", calls)], device=device)
    outcome.microseconds, outcome.floor = row.us, floor
    return result, outcome


def why_not(operator: str, layer: Layer, device: torch.device | None) -> str:
    """An operator's own reason not to run this layer on ``device``, from its capability table; "" where it runs.

    device: None for no GPU, which needs no reason.
    """
    if device is None:
        return ""
    if operator == "decode":
        shape = layer.shape
        return (
            operators.find("hpc_attention")
            .load()
            .why_not(
                kv_dtype=FP8,
                head_dim=shape.head_dim,
                num_q_heads=shape.num_q_heads,
                num_kv_heads=shape.num_kv_heads,
                page_size=shape.page_size,
                device=device,
            )
        )
    if operator == "fused_moe":
        return operators.find("hpc_moe").load().why_not("block", torch.bfloat16, device)
    return operators.find("hpc_router_gemm").load().why_not(operator, device=device, terms=TERMS)


def _text(tensor: torch.Tensor) -> str:
    names = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    return f"{names[tensor.dtype]} {list(tensor.shape)}"


def _attention_reference(layer: Layer, progress: Progress) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 out [B, Hq, D] and lse [B, Hq], a request at a time."""
    cache = layer.cache
    progress.phase("attention in float64", sum(layer.lengths))
    rows = []
    for request, length in enumerate(layer.lengths):
        one = slice(request, request + 1)
        rows.append(
            attention_reference.decode(
                layer.q[one],
                cache.k_cache,
                cache.v_cache,
                cache.page_table[one],
                [length],
                k_scale=layer.k_scale,
                v_scale=layer.v_scale,
            )
        )
        progress.advance(length)
    outs, lses = zip(*rows, strict=True)
    return torch.cat(outs), torch.cat(lses)


def attention(
    layer: Layer, gpu: torch.device | None, progress: Progress
) -> tuple[list[Outcome], torch.Tensor, DecodeSchedule]:
    """The step's plan, then decode. Returns outcomes, the attention output [B, Hq, D] on the CPU, and the schedule."""
    shape, cache, lengths = layer.shape, layer.cache, layer.lengths
    reference, reference_lse = _attention_reference(layer, progress)
    entry = operators.find("hpc_attention")
    if not entry.usable:
        schedule = plan_decode(lengths, shape.num_kv_heads, CTAS_WITHOUT_GPU)
        return [Outcome("decode", note=entry.missing)], reference.to(torch.bfloat16), schedule
    module = entry.load()

    def new_plan(device: torch.device) -> Any:
        return module.DecodePlan(
            max_batch=len(lengths),
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            kv_dtype=FP8,
            device=device,
        )

    def update(seq_lens: torch.Tensor) -> Callable[[], Any]:
        plan = new_plan(seq_lens.device)

        def call() -> Any:
            plan.update(seq_lens)
            return plan

        return call

    progress.phase("attention", 2)
    plan, planned = _call("DecodePlan.update", gpu, "", update, [cache.seq_lens], 0, timing.EMPTY_KERNEL_US)
    schedule = plan.host_map()
    host = plan_decode(
        lengths,
        shape.num_kv_heads,
        plan.num_ctas,
        max_seq_len=plan.max_seq_len,
        max_batch=plan.max_batch,
        min_tiles=plan.min_tiles,
    )
    planned.result = f"{schedule.total_tiles:,} tiles on {schedule.used_ctas} CTAs"
    planned.checks = checks.plan(schedule, host, lengths)
    progress.advance()

    def decode(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, seq_lens: torch.Tensor
    ) -> Callable[[], Any]:
        own = update(seq_lens)()
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        return lambda: module.decode(q, k, v, table, own, **scales, return_lse=True)

    tensors = [layer.q, cache.k_cache, cache.v_cache, cache.page_table, cache.seq_lens]
    read = 2 * sum(lengths) * shape.num_kv_heads * shape.head_dim
    (out, lse), outcome = _call(
        "decode", gpu, why_not("decode", layer, gpu), decode, tensors, read, timing.floor_us(read)
    )
    outcome.result = _text(out)
    outcome.checks = checks.attention(out, lse, reference, reference_lse)
    progress.advance()
    return [planned, outcome], out.cpu(), schedule


def router(
    layer: Layer, x: torch.Tensor, gpu: torch.device | None, progress: Progress
) -> tuple[list[Outcome], torch.Tensor, torch.Tensor]:
    """Scores, then top-k. x: [B, H] bf16 on the CPU. Returns outcomes, ids int32 and weights fp32 [B, k] on the CPU."""
    progress.phase("router", 2)
    k, weight = layer.shape.top_k, layer.router
    entry = operators.find("hpc_router_gemm")
    if not entry.usable:
        chosen = router_reference.route(router_reference.scores(x, weight), k)
        return [Outcome("route", note=entry.missing)], chosen.ids.int(), chosen.weights.float()
    module = entry.load()
    experts, hidden = weight.shape
    read = weight.numel() * 4 + x.numel() * 2
    operations = 2 * TERMS * len(x) * experts * hidden

    def product(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
        owned = module.RouterWeight(weight, terms=TERMS)
        return lambda: module.router_gemm(x, owned)

    floor = timing.floor_us(read + len(x) * experts * 4, operations)
    scores, first = _call("router_gemm", gpu, why_not("router_gemm", layer, gpu), product, [x, weight], read, floor)
    first.result = _text(scores)
    first.checks = checks.scores(scores, x, weight, TERMS)
    progress.advance()

    def choice(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
        owned = module.RouterWeight(weight, terms=TERMS)
        return lambda: module.route(x, owned, k)

    floor = timing.floor_us(read, operations)
    (ids, weights), second = _call("route", gpu, why_not("route", layer, gpu), choice, [x, weight], read, floor)
    second.checks, decided = checks.route(ids, weights, x, weight, TERMS)
    second.result = f"top {k}, {decided}/{len(x)} decided"
    progress.advance()
    return [first, second], ids.cpu(), weights.cpu()


def experts(
    layer: Layer,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gpu: torch.device | None,
    progress: Progress,
) -> list[Outcome]:
    """The experts of the tokens x [B, H] bf16, with ids and weights [B, k], all on the CPU."""
    progress.phase("experts", 2)
    entry = operators.find("hpc_moe")
    if not entry.usable:
        return [Outcome("fused_moe", note=entry.missing)]
    module = entry.load()

    def moe(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *parameters: torch.Tensor) -> Callable[[], Any]:
        w13, w13_scale, w2, w2_scale = parameters
        quant = module.Fp8Block(w13_scale, w2_scale)
        return lambda: module.fused_moe(x, w13, w2, ids, weights, quant=quant)

    touched = len(ids.unique())
    per_expert = 3 * layer.shape.intermediate * layer.shape.hidden
    read = touched * per_expert
    tensors = [x, ids, weights, layer.w13, layer.w13_scale, layer.w2, layer.w2_scale]
    floor = timing.floor_us(read, 2 * ids.numel() * per_expert, FP8)
    out, outcome = _call("fused_moe", gpu, why_not("fused_moe", layer, gpu), moe, tensors, read, floor)
    outcome.result = f"{list(out.shape)}, {touched} experts"
    progress.advance()
    reference = moe_reference.fused_moe(
        x, layer.w13, layer.w2, ids, weights, "block", w13_scale=layer.w13_scale, w2_scale=layer.w2_scale
    )
    outcome.checks = checks.moe(out, reference)
    progress.advance()
    return [outcome]
