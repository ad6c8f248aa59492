"""Times of ``fused_moe`` where experts are not equally popular, beside the same call with uniform ids.

    python packages/hpc-moe/benchmarks/skew.py [--json results.json]

Zipf: a token's experts are drawn without repetition with probabilities 1 / rank (s = 1.0), the ranks shuffled; beside
it the same tokens with ids uniform over just the experts that were hit. One expert: top_k 1 and every token on the same
expert; beside it the two products of that size by torch._scaled_mm, which is what a dense layer would run (without its
activation and quantisation). Names: ``moe-skew-tensor``, ``moe-one-expert``.
"""

import argparse

import hpc_moe
import moe as bench
import torch
from hpc_common.timing import Candidate, Row, measure, results, write_results

ZIPF = {"hy3-tp8": (64, 512, 2048, 8192), "hy3-ep8": (64, 512, 2048), "qwen3-30b": (64, 1024, 4096)}
ONE = {"hy3-tp8": (512, 8192), "hy3-ep8": (512, 2048, 8192), "qwen3-30b": (512, 4096)}


def zipf(shape: bench.Shape, device: str) -> bench.Draw:
    """Ids by a Zipf law with s = 1.0 over shuffled experts, none twice in a token (Gumbel top-k)."""
    order = torch.randperm(shape.drawn, generator=torch.Generator().manual_seed(7)).to(device)
    score = -torch.log(1.0 + order.float())

    def draw(tokens: int, generator: torch.Generator) -> torch.Tensor:
        uniform = torch.rand(tokens, shape.drawn, device=device, generator=generator).clamp_min(1e-20)
        return (score - torch.log(-torch.log(uniform))).topk(bench.TOP_K, dim=1).indices

    return draw


def uniform_over(experts: torch.Tensor) -> bench.Draw:
    """Ids uniform over ``experts`` alone."""

    def draw(tokens: int, generator: torch.Generator) -> torch.Tensor:
        scores = torch.rand(tokens, len(experts), device=experts.device, generator=generator)
        return experts[scores.topk(bench.TOP_K, dim=1).indices]

    return draw


def one_expert(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Every token on expert 3, top_k 1."""
    return torch.full((tokens, 1), 3, device=generator.device)


def dense(shape: bench.Shape, tokens: int, weights: bench.Weights, device: str) -> list:
    """The two products of one expert's layer, by torch._scaled_mm on e4m3 operands; a call for each buffer set."""
    one = torch.ones((), device=device)
    made = []
    for _ in range(4 if tokens <= 256 else 2):
        x = torch.randn(tokens, shape.hidden, device=device).to(torch.float8_e4m3fn)
        act = torch.randn(tokens, shape.intermediate, device=device).to(torch.float8_e4m3fn)

        def call(x: torch.Tensor = x, act: torch.Tensor = act) -> torch.Tensor:
            options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
            torch._scaled_mm(x, weights.w13[3].t(), **options)
            return torch._scaled_mm(act, weights.w2[3].t(), **options)

        made.append(call)
    return made


def run(device: str = "cuda") -> list[Row]:
    """All rows, printed as they come."""
    rows: list[Row] = []
    for shape in bench.SHAPES:
        if shape.name not in ZIPF:
            continue
        weights = bench.make_weights(shape, "tensor", device)
        for tokens in ZIPF[shape.name]:
            name, law = f"{shape.name} m={tokens}", zipf(shape, device)
            first = law(tokens, torch.Generator(device).manual_seed(tokens))
            draws = {"zipf": law, "uniform over the experts hit": uniform_over(first.unique())}
            latest = measure(
                [
                    Candidate(
                        "moe-skew-tensor",
                        name,
                        f"ours, {kind}",
                        bench.calls(shape, tokens, "tensor", weights, device, draw=draw),
                    )
                    for kind, draw in draws.items()
                ]
            )
            rows += latest
            print(f"{name:18s} zipf {latest[0].us:8.1f} uniform {latest[1].us:8.1f}: {latest[0].us / latest[1].us:.2f}")
        for tokens in ONE[shape.name]:
            name = f"{shape.name} m={tokens}"
            latest = measure(
                [
                    Candidate(
                        "moe-one-expert",
                        name,
                        "ours",
                        bench.calls(shape, tokens, "tensor", weights, device, draw=one_expert),
                    ),
                    Candidate("moe-one-expert", name, "torch._scaled_mm, twice", dense(shape, tokens, weights, device)),
                ]
            )
            rows += latest
            print(f"{name:18s} one  {latest[0].us:8.1f} dense   {latest[1].us:8.1f}: {latest[0].us / latest[1].us:.2f}")
        del weights
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write results here")
    args = parser.parse_args()
    rows = run()
    if args.json:
        write_results(args.json, results(rows, {"hpc_moe": hpc_moe._C.build_info()}))


if __name__ == "__main__":
    main()
