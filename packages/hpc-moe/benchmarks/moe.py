"""Times of ``fused_moe`` on a Hopper GPU: the rows ``moe-block``, ``moe-tensor`` and ``moe-bf16``.

    python packages/hpc-moe/benchmarks/moe.py --json results.json [--op moe-block] [--case tp8] [--most 256] [--peers]
        [--bf16-x]

A row's name is the model's shape and the tokens of the call: ``hy3-tp8 m=16``. Activations come as e4m3 (``moe-bf16``:
bf16), ids are uniform over the experts without repetition in a token. Each buffer set is one layer's ids and
activations; the weights (450 MB and more, against 60 MB of L2) are the same in all of them. --peers times torch's
grouped GEMMs and SGLang beside ours, in the same rounds, where they are installed.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hpc_moe
import peers
import torch
from hpc_common.metrics import error
from hpc_common.timing import Candidate, Row, measure, results, write_results

TOP_K = 8
Draw = Callable[[int, torch.Generator], torch.Tensor]  # (tokens, generator of the device) -> ids


@dataclass(frozen=True)
class Shape:
    """A model's expert layer on one rank: ``experts`` of ``all_experts`` here, ids drawn from ``drawn``."""

    name: str
    experts: int
    all_experts: int
    drawn: int
    hidden: int
    intermediate: int
    tokens: tuple[int, ...]


SHAPES = (
    Shape("hy3-tp8", 192, 192, 192, 4096, 192, (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    Shape("hy3-ep8", 24, 24, 24, 4096, 1536, (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)),
    Shape("hy3-ep8-global", 24, 192, 192, 4096, 1536, (8, 64, 256, 1024, 4096, 16384)),
    Shape("qwen3-30b", 128, 128, 128, 2048, 768, (1, 8, 64, 256, 1024, 4096)),
)


@dataclass(frozen=True)
class Weights:
    """Weights of one shape: w13 [E, 2I, H], w2 [E, H, I] and the scales that ``quant`` names need."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None


def random_e4m3(shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Random finite e4m3 codes, made in slices so that no wide copy of a large tensor exists."""
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for part in out:
        part.copy_((torch.randn(part.shape, device=device, dtype=torch.float16) * 64).clamp(-448, 448))
    return out


def make_weights(shape: Shape, quant: str, device: str) -> Weights:
    """Random weights of ``shape`` for ``quant`` ("block", "tensor" or "none")."""
    e, h, i = shape.experts, shape.hidden, shape.intermediate
    if quant == "none":
        w13 = torch.randn(e, 2 * i, h, dtype=torch.bfloat16, device=device) / h**0.5
        w2 = torch.randn(e, h, i, dtype=torch.bfloat16, device=device) / i**0.5
        return Weights(w13, w2, None, None)
    w13, w2 = random_e4m3((e, 2 * i, h), device), random_e4m3((e, h, i), device)
    if quant == "tensor":
        scale = torch.full((e,), 2.0**-11, device=device)
        return Weights(w13, w2, scale, scale.clone())
    block = 128 if i % 128 == 0 else 64
    w13_scale = torch.full((e, 2 * i // block, h // 128), 2.0**-11, device=device)
    w2_scale = torch.full((e, h // 128, i // block), 2.0**-11, device=device)
    return Weights(w13, w2, w13_scale, w2_scale)


def calls(
    shape: Shape,
    tokens: int,
    quant: str,
    weights: Weights,
    device: str,
    x_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    draw: Draw | None = None,
) -> list[Callable[[], torch.Tensor]]:
    """One call for each buffer set of a row; x is e4m3 unless ``x_dtype`` (or bf16 weights) says bf16.

    ``draw`` makes the ids, [T, k] global experts; None: uniform over the shape's experts, none twice in a token.
    """
    bf16 = quant == "none" or x_dtype == torch.bfloat16
    workspace = hpc_moe.MoeWorkspace(
        tokens,
        TOP_K,
        shape.experts,
        shape.hidden,
        shape.intermediate,
        quant,
        shape.all_experts,
        torch.bfloat16 if bf16 else torch.float8_e4m3fn,
        batch_invariant,
        device=device,
    )
    made = []
    for x, ids, topk_weights, scales in buffer_sets(shape, tokens, quant, weights, device, bf16, draw):
        out = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device=device)

        def call(x=x, ids=ids, topk_weights=topk_weights, scales=scales, out=out) -> torch.Tensor:
            return hpc_moe.fused_moe(
                x,
                weights.w13,
                weights.w2,
                ids,
                topk_weights,
                scales,
                num_experts=shape.all_experts,
                batch_invariant=batch_invariant,
                workspace=workspace,
                out=out,
            )

        made.append(call)
    return made


def buffer_sets(
    shape: Shape, tokens: int, quant: str, weights: Weights, device: str, bf16: bool, draw: Draw | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]]:
    """x, topk_ids, topk_weights and quant of each layer of a row; the same numbers whenever it is called."""
    generator = torch.Generator(device).manual_seed(tokens)
    for _ in range(4 if tokens <= 256 else 2):
        x = torch.randn(tokens, shape.hidden, device=device, generator=generator)
        if draw is None:
            ids = torch.rand(tokens, shape.drawn, device=device, generator=generator).topk(TOP_K, dim=1).indices
        else:
            ids = draw(tokens, generator)
        topk_weights = torch.rand(ids.shape, device=device, generator=generator)
        scales: hpc_moe.Fp8Block | hpc_moe.Fp8Tensor | None = None
        one = torch.full((1,), 1 / 64, device=device)
        if quant == "block":
            row_scale = torch.full((tokens, shape.hidden // 128), 1 / 64, device=device)
            scales = hpc_moe.Fp8Block(weights.w13_scale, weights.w2_scale, None if bf16 else row_scale)
        elif quant == "tensor":
            scales = hpc_moe.Fp8Tensor(weights.w13_scale, weights.w2_scale, one, one)
        x = x.to(torch.bfloat16) if bf16 else (x * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
        yield x, ids.to(torch.int32), topk_weights, scales


def peer_candidates(
    op: str, case: str, shape: Shape, tokens: int, quant: str, weights: Weights, device: str
) -> list[Candidate]:
    """Peers of a row that are installed, run and agree with ours; prints why the others are not there."""
    found, missing = peers.find(op, shape.intermediate, shape.all_experts == shape.experts)
    for reason in missing:
        print(f"  {case}: {reason}", flush=True)
    candidates = []
    for name, (peer, wants_bf16) in found.items():
        bf16 = quant == "none" or wants_bf16
        sets = list(buffer_sets(shape, tokens, quant, weights, device, bf16))
        made = [lambda s=s, peer=peer: peer(s[0], weights.w13, weights.w2, *s[1:]) for s in sets]
        ours = calls(shape, tokens, quant, weights, device, torch.bfloat16 if bf16 else None)[0]()
        candidate = Candidate(op, case, name, made)
        try:
            apart = error(made[0](), ours.double().cpu()).relative_rms
            measure([candidate], replays=1, rounds=1, device=device)  # that a graph can hold it, too
        except Exception as problem:  # whatever another library raises, our rows and the other peers' go on
            print(f"  {case}: {name} failed: {type(problem).__name__}: {problem}"[:150], flush=True)
            continue
        if apart > 0.05:
            print(f"  {case}: {name}: {apart:.3f} from ours, not timed", flush=True)
            continue
        candidates.append(candidate)
    return candidates


def run(
    ops: tuple[str, ...],
    match: str = "",
    device: str = "cuda",
    before: Callable[[str], None] = lambda name: None,
    with_peers: bool = False,
    with_bf16: bool = False,
    most: int | None = None,
) -> list[Row]:
    """Rows of ``ops`` whose case contains ``match`` (or one of several, between commas), printed as they come.

    ``before`` gets each row's name first. ``with_bf16``: beside each FP8 row the same call with bf16 activations,
    quantised inside. ``most``: rows of up to so many tokens alone.
    """
    rows = []
    for op in ops:
        quant = {"moe-block": "block", "moe-tensor": "tensor", "moe-bf16": "none"}[op]
        for shape in SHAPES:
            cases = [
                tokens
                for tokens in shape.tokens
                if any(part in f"{shape.name} m={tokens}" for part in match.split(",")) and tokens <= (most or tokens)
            ]
            if not cases:
                continue
            weights = make_weights(shape, quant, device)
            for tokens in cases:
                name = f"{shape.name} m={tokens}"
                before(f"{op} {name}")
                beside = [Candidate(op, name, "ours", calls(shape, tokens, quant, weights, device))]
                if with_bf16 and quant != "none":
                    own = calls(shape, tokens, quant, weights, device, torch.bfloat16)
                    beside.append(Candidate(op, name, "ours, bf16 x", own))
                if with_peers:
                    beside += peer_candidates(op, name, shape, tokens, quant, weights, device)
                rows += (latest := measure(beside, device=device))
                print(f"{op:11s} {name:23s} " + "  ".join(f"{row.provider} {row.us:.1f}" for row in latest), flush=True)
            del weights
    return rows


def profile(device: str = "cuda", before: Callable[[str], None] = lambda name: None) -> None:
    """Print the mean duration of each kernel in a few rows (with HPC_PDL=0: an early start would count its wait)."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    names = ("hy3-tp8 m=64", "hy3-tp8 m=2048", "hy3-ep8 m=1024", "qwen3-30b m=256")
    for shape in SHAPES:
        for tokens in [each for each in shape.tokens if f"{shape.name} m={each}" in names]:
            before(f"profile {shape.name} m={tokens}")
            weights = make_weights(shape, "block", device)
            made = calls(shape, tokens, "block", weights, device)
            for call in made:
                call()
            torch.cuda.synchronize()
            with record(activities=[ProfilerActivity.CUDA]) as recorded:
                for call in made * 5:
                    call()
                torch.cuda.synchronize()
            print()
            for event in recorded.key_averages():
                if event.device_time_total:
                    print(f"    {event.device_time_total / event.count:8.1f} us x {event.count:4d} {event.key[:80]}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write results here")
    parser.add_argument("--op", default="moe-tensor,moe-block", help="comma-separated: moe-tensor, moe-block, moe-bf16")
    parser.add_argument("--case", default="", help="only cases that contain this, or one of several between commas")
    parser.add_argument("--most", type=int, help="only cases of up to so many tokens")
    parser.add_argument("--peers", action="store_true", help="other implementations too")
    parser.add_argument("--bf16-x", action="store_true", help="bf16 activations too, beside e4m3 ones")
    args = parser.parse_args()
    rows = run(tuple(args.op.split(",")), args.case, with_peers=args.peers, with_bf16=args.bf16_x, most=args.most)
    if args.json:
        write_results(args.json, results(rows, {"hpc_moe": hpc_moe._C.build_info()}))


if __name__ == "__main__":
    main()
