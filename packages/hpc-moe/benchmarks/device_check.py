"""One run on a Hopper GPU that says whether the kernels of ``fused_moe`` are right, and then how fast.

    python device_check.py OUT.json [--no-time] [--no-check] [--profile] [--match TEXT] [--seconds S]

Needs hpc_common and hpc_moe on the path, and torch. Each case compares with a float64 computation on the GPU that has
the operator's quantisation points, repeats the call on dirty workspaces for equal bits, and checks the routing index. A
case that does not end within 45 s ends the process with a traceback: a hang is a failure with a name (--seconds: more,
for a run under a sanitizer). The capability table is bypassed: this is how a kernel earns its place in it.
"""

import argparse
import dataclasses
import faulthandler
import functools
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Callable

import moe as bench
import torch
from device_cases import DEVICE, Case, Inputs, as_call, call, expected, grid, make
from hpc_common.capability import capability
from hpc_moe import _C, support

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))
import moe_kernel_checks  # noqa: E402

LIMIT, LIMIT_TOKEN = 0.006, 0.02  # relative RMS over the output, and in any token
support.SUPPORT = tuple(dataclasses.replace(row, cuda=True) for row in support.SUPPORT)


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def config_of(case: Case) -> "_C.Config":
    """The Config the call uses."""
    sms = capability(DEVICE).num_sms
    return _C.make_config(
        num_tokens=case.tokens,
        top_k=case.k,
        num_local_experts=case.experts,
        num_experts=case.experts * case.ep,
        hidden=case.hidden,
        intermediate=case.inter,
        quant=case.quant,
        x_is_bf16=case.x == "bf16",
        batch_invariant=case.invariant,
        num_sms=sms,
    )


def check_index(case: Case, c: Inputs, config: "_C.Config", workspace: torch.Tensor) -> str:
    """Compares offsets and both maps with a stable sort; "" where they agree (only calls of one chunk)."""
    if config.num_chunks != 1:
        return ""

    def view(offset: int, count: int) -> torch.Tensor:
        return workspace[offset : offset + 4 * count].view(torch.int32).long()

    pairs, layout = c.ids.numel(), config.layout
    local = c.ids.flatten().long() - case.rank * case.experts
    local = torch.where((local >= 0) & (local < case.experts), local, case.experts)
    order = torch.argsort(local, stable=True)
    counts = torch.bincount(local, minlength=case.experts + 1)[: case.experts]
    live = int(counts.sum())
    rows = torch.full((pairs,), -1, device=DEVICE)
    rows[order[:live]] = torch.arange(live, device=DEVICE)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    if not torch.equal(view(layout.offsets, case.experts + 1), offsets):
        return "offsets differ"
    if not torch.equal(view(layout.slot_to_row, pairs), rows):
        return "slot_to_row differs"
    return "" if torch.equal(view(layout.row_to_slot, pairs)[:live], order[:live]) else "row_to_slot differs"


def errors(out: torch.Tensor, want: torch.Tensor) -> tuple[float, float, float]:
    """Relative RMS error over the output, the worst token's, and the share of tokens above the limit for one."""
    difference = out.double() - want
    scale = want.square().mean(1)
    token = (difference.square().mean(1) / scale.clamp_min(1e-300)).sqrt()
    token = torch.where(scale > 0, token, torch.where((out == 0).all(1), 0.0, torch.inf)).nan_to_num(torch.inf)
    rms = float((difference.square().mean() / want.square().mean().clamp_min(1e-300)).sqrt())
    return rms, float(token.max()), float((token > LIMIT_TOKEN).double().mean())


def check(case: Case) -> tuple[float, float, str]:
    """Relative RMS, the worst token's, and what is wrong ("" for nothing)."""
    c = make(case)
    config = config_of(case)
    workspace = torch.empty(config.layout.bytes, dtype=torch.uint8, device=DEVICE)
    out = call(case, c, workspace)
    synchronise()
    low = config.regime == "low"
    wrong = "" if low and DEVICE == "cuda" else check_index(case, c, config, workspace)
    rms, worst, above = errors(out, expected(case, c))
    halves = case.quant != "none" and config.num_chunks == 1
    if halves:
        wrong = wrong or moe_kernel_checks.halves(as_call(case, c), config, out, workspace, DEVICE)
    if case.quant == "none" or low or config.exact:  # fp32 sums: no activation rounds the other way
        exact = rms <= LIMIT and worst <= LIMIT_TOKEN
        wrong = wrong or ("" if exact else f"error, {above:.4f} of the tokens off")
    else:  # bounds that hold where every token sums over many activations
        loose = rms <= (LIMIT if case.k >= 8 and case.hidden >= 2048 else 0.02) and worst <= 0.1 and above <= 0.1
        wrong = wrong or ("" if loose else f"error, {above:.4f} of the tokens off")
    for _ in range(10):
        if not torch.equal(call(case, c, workspace).view(torch.int16), out.view(torch.int16)):
            wrong = wrong or "repeats differ"
            break
    return rms, worst, wrong


def check_invariance() -> str:
    """Rows of y must not depend on the batch or the rank: "" where their bits agree."""
    for quant in ("tensor", "block"):
        full = Case(quant, 600, experts=16, k=4, hidden=512, inter=256, invariant=True)
        c = make(full)
        config = config_of(full)
        workspace = torch.empty(config.layout.bytes, dtype=torch.uint8, device=DEVICE)
        call(full, c, workspace)

        def rows_of(case: Case, space: torch.Tensor) -> torch.Tensor:
            layout = config_of(case).layout
            pairs = case.tokens * case.k
            slots = space[layout.slot_to_row : layout.slot_to_row + 4 * pairs].view(torch.int32).long()
            y = space[layout.y : layout.y + 2 * pairs * case.hidden].view(torch.int16).view(pairs, case.hidden)
            return torch.where((slots >= 0)[:, None], y[slots.clamp_min(0)], 0)

        want = rows_of(full, workspace)
        first = dataclasses.replace(full, tokens=3)
        part = dataclasses.replace(
            c, x=c.x[:3], ids=c.ids[:3], weights=c.weights[:3], x_scale=c.x_scale[:3] if quant == "block" else c.x_scale
        )
        space = torch.empty(config_of(first).layout.bytes, dtype=torch.uint8, device=DEVICE)
        call(first, part, space)
        if not torch.equal(rows_of(first, space), want[: 3 * full.k]):
            return f"{quant}: rows of 3 tokens differ from the same tokens among 600"
        total = torch.zeros_like(want)
        for rank in range(4):
            mine = dataclasses.replace(full, experts=4, ep=4, rank=rank)
            cut = slice(4 * rank, 4 * rank + 4)
            part = dataclasses.replace(
                c, w13=c.w13[cut], w2=c.w2[cut], w13_scale=c.w13_scale[cut], w2_scale=c.w2_scale[cut]
            )
            space = torch.empty(config_of(mine).layout.bytes, dtype=torch.uint8, device=DEVICE)
            call(mine, part, space)
            total += rows_of(mine, space)
        if not torch.equal(total, want):
            return f"{quant}: the ranks' rows are not a single rank's"
        few = Case(quant, 32, experts=16, k=4, hidden=512, inter=256)  # low: no rows in memory, but the same outputs
        c = make(few)
        out = call(few, c, torch.empty(config_of(few).layout.bytes, dtype=torch.uint8, device=DEVICE))
        part = dataclasses.replace(
            c, x=c.x[:3], ids=c.ids[:3], weights=c.weights[:3], x_scale=c.x_scale[:3] if quant == "block" else c.x_scale
        )
        few = dataclasses.replace(few, tokens=3)
        if not torch.equal(
            call(few, part, torch.empty(config_of(few).layout.bytes, dtype=torch.uint8, device=DEVICE)), out[:3]
        ):
            return f"{quant}: outputs of 3 tokens differ from the same tokens among 32"
    return ""


def watch(name: str, seconds: int) -> None:
    """Start the clock of one case; its name is on the screen before anything can hang."""
    print(f"{name} ...", end=" ", flush=True)
    faulthandler.dump_traceback_later(seconds, exit=True)


def run_checks(match: str, watch: Callable[[str], None]) -> list[dict[str, object]]:
    """All cases whose name contains ``match``; ``watch`` is called before each."""
    found = []
    for case in [each for each in grid() if match in each.name()]:
        watch(case.name())
        start = time.perf_counter()
        try:
            rms, worst, wrong = check(case)
        except RuntimeError as error:
            traceback.print_exc()
            found.append({"case": case.name(), "wrong": f"{type(error).__name__}: {error}"[:300]})
            print("FAILED")
            if "CUDA" in str(error) or "cuda" in str(error):
                break  # a sticky error: nothing after it means anything
            continue
        print(f"rms {rms:.5f} worst token {worst:.5f} {time.perf_counter() - start:.1f}s {wrong or 'ok'}", flush=True)
        found.append({"case": case.name(), "rms": rms, "worst_token": worst, "wrong": wrong})
        faulthandler.cancel_dump_traceback_later()
    else:
        if match in "invariance":
            watch("invariance")
            wrong = check_invariance()
            print(wrong or "ok", flush=True)
            found.append({"case": "invariance", "wrong": wrong})
    faulthandler.cancel_dump_traceback_later()
    return found


def main() -> int:
    """Command line; exit status 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--match", default="", help="only checks and rows that contain this")
    parser.add_argument("--seconds", type=int, default=45, help="of one case, after which the process ends")
    args = parser.parse_args()
    watched = functools.partial(watch, seconds=args.seconds)
    device = capability(DEVICE).name
    print(torch.__version__, device, _C.build_info(), flush=True)
    document: dict[str, object] = {"device": device, "build": _C.build_info()}
    path = pathlib.Path(args.json)
    failed = 0
    if not args.no_check:
        document["checks"] = checks = run_checks(args.match, watched)
        failed = sum(1 for each in checks if each["wrong"])
        path.write_text(json.dumps(document, indent=1))
    if args.profile:
        try:
            bench.profile(DEVICE, watched)
            faulthandler.cancel_dump_traceback_later()
        except Exception:  # the profiler may not work on this machine; times below do not need it
            traceback.print_exc()
    if not args.no_time:
        rows = bench.run(("moe-tensor", "moe-block"), args.match, DEVICE, watched)
        faulthandler.cancel_dump_traceback_later()
        document["rows"] = [dataclasses.asdict(row) for row in rows]
        path.write_text(json.dumps(document, indent=1))
        print(f"\n{'case':24s} {'tensor us':>10s} {'block us':>10s}")
        times = {(row.op, row.case): row.us for row in rows}
        for case in dict.fromkeys(row.case for row in rows):
            pair = [times.get((op, case), float("nan")) for op in ("moe-tensor", "moe-block")]
            print(f"{case:24s} {pair[0]:10.1f} {pair[1]:10.1f}")
    if not args.no_check:
        print(
            f"{len(checks)} checks, {failed} failed"
            + "".join(f"\n  {c['case']}: {c['wrong']}" for c in checks if c["wrong"])
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
