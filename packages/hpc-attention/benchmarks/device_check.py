"""One run on a Hopper GPU that says whether decode is right, then how fast it is, then which settings are faster.

`python device_check.py [--skip-values] [--skip-times] [--variants] [--only TEXT] [--seconds S]`, where hpc_attention
and hpc_common can be imported. Works also before the support table names the kernels. The short tables at the end are
the result; exit status 1 where a value is wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hpc_attention.support as support

# Before anything reads the table: pretend that every decode row has its kernel.
support.SUPPORT = tuple(
    replace(row, cuda=True, note="") if row.operator == "decode" else row for row in support.SUPPORT
)

import decode as bench  # noqa: E402
import torch  # noqa: E402
from hpc_attention import DecodePlan, _cuda, decode  # noqa: E402
from hpc_attention.testing import Inputs, Problem  # noqa: E402
from hpc_common.timing import Candidate, measure  # noqa: E402

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
KINDS = ((BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8), (FP8, FP8))


# ---- Values ----


def problems() -> Iterator[Problem]:
    """Small problems over every kind, head_dim, row count, page size and option; then long ones."""
    base = Problem(lengths=(1, 64, 700, 0, 130, 65), num_q_heads=8, num_kv_heads=2)
    for q_dtype, kv_dtype in KINDS:
        kind = replace(base, q_dtype=q_dtype, kv_dtype=kv_dtype)
        for head_dim in (64, 128, 256):
            for heads, q_len in ((8, 1), (32, 1), (24, 2), (32, 8)):  # 4, 16, 24 and 128 rows
                yield replace(kind, head_dim=head_dim, num_q_heads=heads, q_len=q_len)
        for page_size in (1, 16, 32, 128, 256):
            yield replace(kind, page_size=page_size, layout="HND")
        for layout in ("interleaved", "uneven"):
            yield replace(kind, layout=layout)
        for ratio in (1, 3, 5, 7, 8, 12, 16):
            yield replace(kind, num_q_heads=2 * ratio)
        for q_len in range(1, 9):
            yield replace(kind, q_len=q_len, window=70 if q_len % 2 else None)
        yield replace(
            kind, window=100, softcap=8.0, sinks=True, sm_scale=0.11, k_scale="token", v_scale="head", page_size=1
        )
        yield replace(kind, batch_invariant=True, lengths=(1300, 65, 1, 0, 5000), k_scale="head", v_scale="one")
        yield replace(kind, lengths=(5000, 64), num_ctas=64, k_scale="token")


def long_problems() -> Iterator[tuple[str, bench.Case]]:
    for kv_dtype in (BF16, FP8):
        for lengths in ("1x4K", "1x128K+3x0.125K", "64x0.5K", "8x8K", "33x1000", "1x1024K"):
            yield lengths, bench.Case("values", lengths, kv_dtype)
        yield "64/8 8x2K", bench.Case("values", "8x2K", kv_dtype, 64, 8)
        yield "q_len 8 4x4K", bench.Case("values", "4x4K", kv_dtype, 16, 2, q_len=8)


def dense_error(layers: bench.Layers) -> float:
    """Largest error of one layer relative to the output's RMS, against float64 on the GPU."""
    case = layers.case
    q, k_cache, v_cache, out = layers.sets[0]
    worst = 0.0
    group = case.num_q_heads // case.num_kv_heads
    for request, length in enumerate(layers.seq_lens.tolist()):
        pages = layers.page_table[request, : -(-length // case.page_size)].long()
        rows = slice(request * case.q_len, (request + 1) * case.q_len)
        for head in range(case.num_kv_heads):
            keys = k_cache.view(torch.uint8 if case.kv_dtype == FP8 else torch.int16)[pages, :, head].flatten(0, 1)
            values = v_cache.view(torch.uint8 if case.kv_dtype == FP8 else torch.int16)[pages, :, head].flatten(0, 1)
            keys = keys.view(case.kv_dtype)[:length].double()
            values = values.view(case.kv_dtype)[:length].double()
            heads = slice(head * group, (head + 1) * group)
            scores = q[rows, heads].double() @ keys.T * case.head_dim**-0.5  # [q_len, group, length]
            last = length - case.q_len + torch.arange(case.q_len, device=q.device)
            seen = torch.arange(length, device=q.device) <= last[:, None]
            weights = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), -1)
            want = weights @ values
            error = (out[rows, heads].double() - want).abs().max() / want.square().mean().sqrt()
            worst = max(worst, float(error))
    return worst


def check_values(only: str) -> list[str]:
    """The failures, in words."""
    device = torch.device("cuda")
    failures: list[str] = []
    count = 0
    for problem in problems():
        name = f"{problem}"
        if only not in name:
            continue
        count += 1
        try:
            inputs = problem.make(device)
            out, lse = inputs.run()
            inputs.check(out, lse)
            again, again_lse = inputs.run(out=torch.full_like(out, float("nan")))
            assert torch.equal(again, out) and torch.equal(again_lse, lse), "a second run gives other bits"
        except (AssertionError, ValueError, TypeError, RuntimeError) as error:
            failures.append(f"{type(error).__name__}: {str(error)[:160]}: {name}")
            print(failures[-1], flush=True)
            if "CUDA error" in str(error) or "cuda" in str(error).lower():
                return failures  # the context is lost
    print(f"values: {count} small problems, {len(failures)} wrong", flush=True)
    for name, case in long_problems():
        layers = bench.Layers(replace(case), device)
        layers.calls()[0]()
        torch.cuda.synchronize()
        error = dense_error(layers)
        bad = not error < 0.03
        print(
            f"values: {name:18s} {str(case.kv_dtype)[6:]:14s} largest error / RMS {error:.4f}{'  WRONG' if bad else ''}"
        )
        if bad:
            failures.append(f"{name} {case.kv_dtype}: error {error:.3g}")
        del layers
    for check in (check_graph, check_nan_tails, check_batch_invariance, check_repeats):
        try:
            check(device)
        except AssertionError as error:
            failures.append(f"{check.__name__}: {error}")
            print(failures[-1], flush=True)
    return failures


def check_graph(device: torch.device) -> None:
    """A captured step (plan and four layers) follows lengths and page tables that change between replays."""
    problem = Problem(lengths=(4096, 1, 1, 700), num_q_heads=16, num_kv_heads=2, kv_dtype=FP8)
    inputs = problem.make(device)
    cache = inputs.cache
    outs = [torch.empty_like(inputs.q) for _ in range(4)]

    def step() -> None:
        inputs.plan.update(cache.seq_lens)
        for out in outs:
            decode(inputs.q, cache.k_cache, cache.v_cache, cache.page_table, inputs.plan, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ((4096, 1, 1, 700), (1, 1, 1, 64), (3000, 0, 1, 699), (64, 1, 0, 65)):
        cache.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for out in outs:
            out.fill_(float("nan"))
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        plan = DecodePlan(4, 16, 2, 128, 64, kv_dtype=FP8, device=device)
        plan.update(cache.seq_lens)
        want = decode(inputs.q, cache.k_cache, cache.v_cache, cache.page_table, plan)
        for out in outs:
            assert torch.equal(out, want), f"replay with lengths {lengths} differs from the eager call"
    print("graph: replays follow new lengths", flush=True)


def check_nan_tails(device: torch.device) -> None:
    """Slots behind the end hold NaN (Problem's caches do) or zeros: the same bits."""
    for kv_dtype in (BF16, FP8):
        inputs = Problem(lengths=(1, 63, 65, 128, 200), kv_dtype=kv_dtype, num_kv_heads=2).make(device)
        out, lse = inputs.run()
        clean = replace_cache(inputs)
        again, again_lse = inputs.run(k_cache=clean[0], v_cache=clean[1])
        assert torch.equal(out, again) and torch.equal(lse, again_lse), "NaN in a page's tail reaches the output"
    print("NaN tails: no effect", flush=True)


def replace_cache(inputs: Inputs) -> list[torch.Tensor]:
    """The caches with every NaN replaced by zero."""
    caches = []
    for cache in (inputs.cache.k_cache, inputs.cache.v_cache):
        caches.append(torch.nan_to_num(cache.float(), nan=0.0).to(cache.dtype))
    return caches


def check_batch_invariance(device: torch.device) -> None:
    """A request alone and beside others: the same bits in a batch-invariant plan."""
    lengths = (4096, 130, 20000, 1, 900, *range(1, 90, 3))
    for kv_dtype in (BF16, FP8):
        problem = Problem(lengths=lengths, num_kv_heads=2, kv_dtype=kv_dtype, batch_invariant=True, max_seq_len=32768)
        inputs = problem.make(device)
        out, lse = inputs.run()
        for request in (0, 1, 2, 4):
            plan = DecodePlan(
                1, 8, 2, 128, 64, kv_dtype=kv_dtype, device=device, batch_invariant=True, max_seq_len=32768
            )
            plan.update(inputs.cache.seq_lens[request : request + 1].contiguous())
            rows = slice(request, request + 1)
            alone, alone_lse = inputs.run(q=inputs.q[rows], page_table=inputs.cache.page_table[rows], plan=plan)
            assert torch.equal(alone, out[rows]) and torch.equal(alone_lse, lse[rows]), f"request {request} differs"
    print("batch-invariant plans: the same bits in any company", flush=True)


def check_repeats(device: torch.device) -> None:
    """200 runs, back to back in a graph with early starts, give the same bits."""
    layers = bench.Layers(bench.Case("repeats", "1x16K+9x1K+40x100"), device)
    calls = layers.calls()[:2]
    for call in calls:
        call()
    want = [layers.sets[i][3].clone() for i in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            for call in calls:
                call()
    for _ in range(10):
        for i in range(2):
            layers.sets[i][3].fill_(float("nan"))
        graph.replay()
        for i in range(2):
            assert torch.equal(layers.sets[i][3], want[i]), "runs in a graph differ"
    print("repeats: 200 runs in graphs, the same bits", flush=True)


# ---- Times ----


def direct(**knobs: Any) -> Callable[..., Any]:
    """decode with the kernel's own settings (see _cuda.decode); ``late=True``: nothing is read before the wait."""
    late = knobs.pop("late", False)

    def run(q: Any, k: Any, v: Any, table: Any, plan: DecodePlan, out: Any) -> None:
        if late:
            _cuda.map_updated(plan.map)
        _cuda.decode(
            q, k, v, table, plan.map, plan.workspace, out, None, None, None, None, None, 1.0, 1.0, q.shape[2] ** -0.5,
            0.0, plan.q_len, 0, plan.num_ctas, plan.max_batch, plan.max_seq_len, plan.batch_invariant, **knobs,
        )  # fmt: skip

    return run


def variants(layers: bench.Layers) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """Named settings of the same row."""
    yield "default", layers.calls()
    yield "late", layers.calls(run=direct(late=True))
    yield "no combine", layers.calls(run=direct(combine_ctas=-1))
    yield "combine 132", layers.calls(run=direct(combine_ctas=132))
    rows = layers.case.q_len * layers.case.num_q_heads // layers.case.num_kv_heads
    if layers.case.head_dim == 128 and rows <= 8:
        stages, tokens = (4, 16) if layers.case.kv_dtype == FP8 else (1, 32)  # slices of the other size
        for early in range(1, stages + 1):
            yield f"{tokens} tokens, {early}", layers.calls(run=direct(stages=stages, early_slices=early))
    yield "all early", layers.calls(run=direct(early_slices=4))
    for tiles in (1, 2, 4, 8):
        yield f"floor {tiles}", layers.calls(layers.make_plan(min_tiles=tiles))


def times(only: str, with_variants: bool, seconds: float) -> None:
    """A line a row: floor, time, and with variants the time of each."""
    device = torch.device("cuda")
    lines: list[str] = []
    start = time.monotonic()
    for case in bench.tables():
        name = f"{case.op} {case.lengths}"
        if only not in name or time.monotonic() - start > seconds:
            continue
        layers = bench.Layers(case, device)
        named = list(variants(layers)) if with_variants else [("default", layers.calls())]
        named += [] if with_variants else [("plan/48", layers.planned_calls())]
        found = measure([Candidate(case.op, case.lengths, label, calls) for label, calls in named], device=device)
        head = f"{'us':34s}{'floor':>7s}" + "".join(f"{row.provider:>12s}" for row in found)
        lines.append(f"{name:34s}{case.floor_us():7.2f}" + "".join(f"{row.us:12.2f}" for row in found))
        if head not in lines:
            lines.insert(-1, head)
        print(lines[-1], flush=True)
        del layers, named
        torch.cuda.empty_cache()
    print("\n" + "\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-values", action="store_true")
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--variants", action="store_true", help="also measure other settings of every row")
    parser.add_argument("--only", default="", help="problems and rows whose text contains this")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no further row after this long")
    arguments = parser.parse_args()
    torch.set_num_threads(8)
    failures = [] if arguments.skip_values else check_values(arguments.only)
    if not arguments.skip_times:
        times(arguments.only, arguments.variants, arguments.seconds)
    print(f"{len(failures)} failures" + "".join(f"\n  {failure}" for failure in failures[:20]), flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
