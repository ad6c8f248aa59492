"""Times and errors of router_gemm beside cuBLAS, the tables' `router-2` rows and more.

    uv run python packages/hpc-router-gemm/benchmarks/router.py [--json FILE] [--only TEXT] [--terms 2,3]
        [--decode | --route]

Cold: a pass rotates over buffer sets, one a layer. Peers, in the same rounds: cuBLAS fp32 and TF32 with the cast of the
activations, and one bf16 product with fp32 output. Errors are against float64 on the first set, standard-normal x and
weight, at most 1,024 tokens. --decode times M = 1 to 128 at seven model sizes instead, and linear there. --route times
route there: beside its scores alone, and torch's softmax and topk of them. figures.py draws the results.
"""

import argparse
import pathlib

import torch
from hpc_common.timing import Candidate, Row, buffer_sets, measure, results, write_results
from hpc_router_gemm import _C, RouterWeight, linear, route, router_gemm

CASES = {
    (192, 4096): (1, 16, 48, 96, 208, 512, 1024, 2048, 4096),
    (384, 3072): (1, 8, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    (768, 6144): (1, 8, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
}
DECODE = ((192, 4096), (384, 3072), (768, 6144), (256, 7168), (128, 2048), (896, 7168), (64, 2048))
ROUTE = {(192, 4096): 8, (384, 3072): 8, (768, 6144): 16, (256, 7168): 8}  # experts a token
ROUTE_TOKENS = (1, 8, 16, 64, 128, 512, 4096)
DECODE_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
MAX_SETS = 48
ERROR_TOKENS = 1024


def cublas_fp32(x: torch.Tensor, weight: torch.Tensor, tf32: bool) -> torch.Tensor:
    """The cast of x and one fp32 (or TF32) product."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return x.float() @ weight.T
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def candidates(
    m: int, n: int, k: int, terms: tuple[int, ...], device: torch.device, plain: bool = False
) -> list[Candidate]:
    """Ours with each number of terms, linear where ``plain``, and cuBLAS, all on the same buffers."""
    sets = buffer_sets(4 * n * k + 2 * m * k + 4 * m * n, MAX_SETS)
    xs = [torch.randn(m, k, device=device).to(torch.bfloat16) for _ in range(sets)]
    weights = [torch.randn(n, k, device=device) for _ in range(sets)]
    half = [weight.to(torch.bfloat16) for weight in weights]
    out = torch.empty(m, n, device=device)
    case = f"{n}x{k} m={m}"
    result = []
    for count in terms:
        own = [RouterWeight(weight, terms=count) for weight in weights]
        calls = [lambda x=x, w=w: router_gemm(x, w, out=out) for x, w in zip(xs, own, strict=True)]
        result.append(Candidate(f"router-{count}", case, "ours", calls))
    pairs = list(zip(xs, weights, strict=True))
    if plain:
        result.append(Candidate("linear-3", case, "ours", [lambda x=x, w=w: linear(x, w) for x, w in pairs]))
    for name, tf32 in (("cuBLAS fp32", False), ("cuBLAS TF32", True)):
        calls = [lambda x=x, w=w, tf32=tf32: cublas_fp32(x, w, tf32) for x, w in pairs]
        result.append(Candidate("router-2", case, name, calls))
    if device.type == "cuda":
        calls = [lambda x=x, w=w: torch.mm(x, w.T, out_dtype=torch.float32) for x, w in zip(xs, half, strict=True)]
        result.append(Candidate("router-2", case, "cuBLAS bf16 (one product)", calls))
    return result


def route_candidates(m: int, n: int, k: int, chosen: int, device: torch.device) -> list[Candidate]:
    """The choice of experts by softmax, two terms, beside what it is made of."""
    sets = buffer_sets(4 * n * k + 2 * m * k + 4 * m * n, MAX_SETS)
    xs = [torch.randn(m, k, device=device).to(torch.bfloat16) for _ in range(sets)]
    own = [RouterWeight(torch.randn(n, k, device=device)) for _ in range(sets)]
    out = torch.empty(m, n, device=device)
    pairs = list(zip(xs, own, strict=True))
    providers = {
        "ours": lambda x, w: route(x, w, chosen),
        "scores alone": lambda x, w: router_gemm(x, w, out=out),
        "scores, torch's softmax and topk": lambda x, w: router_gemm(x, w, out=out).softmax(1).topk(chosen),
    }
    case = f"{n}x{k} k={chosen} m={m}"
    return [
        Candidate("route-2", case, name, [lambda x=x, w=w, call=call: call(x, w) for x, w in pairs])
        for name, call in providers.items()
    ]


def errors(m: int, n: int, k: int, terms: tuple[int, ...], device: torch.device) -> list[dict[str, str | float]]:
    """Rows of mode "error": root mean square and largest of each implementation's, on the same inputs."""
    x = torch.randn(m, k, device=device).to(torch.bfloat16)
    weight = torch.randn(n, k, device=device)
    some = slice(0, ERROR_TOKENS)
    exact = x[some].double() @ weight.double().T
    scores = {("ours", f"router-{count}"): router_gemm(x, RouterWeight(weight, terms=count)) for count in terms}
    scores["cuBLAS fp32", "router-2"] = cublas_fp32(x, weight, False)
    scores["cuBLAS TF32", "router-2"] = cublas_fp32(x, weight, True)
    if device.type == "cuda":
        scores["cuBLAS bf16 (one product)", "router-2"] = torch.mm(
            x, weight.to(torch.bfloat16).T, out_dtype=torch.float32
        )
    rows = []
    for (provider, op), result in scores.items():
        error = result[some].double() - exact
        rms, largest = float(error.square().mean().sqrt()), float(error.abs().max())
        rows.append(
            {
                "op": op,
                "case": f"{n}x{k} m={m}",
                "provider": provider,
                "mode": "error",
                "rms": float(f"{rms:.3g}"),
                "largest": float(f"{largest:.3g}"),
            }
        )
    return rows


def show(rows: list[Row]) -> None:
    print(
        f"{rows[0].case:18s}"
        + "".join(f"  {row.op.removeprefix('router-')} {row.provider} {row.us:.2f}" for row in rows),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--terms", default="2,3", help="numbers of terms to time")
    parser.add_argument("--decode", action="store_true", help="M = 1 to 128 at model sizes")
    parser.add_argument("--route", action="store_true", help="the choice of experts instead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    terms = tuple(int(count) for count in arguments.terms.split(","))
    sizes = {size: DECODE_TOKENS for size in DECODE} if arguments.decode else CASES
    if arguments.route:
        sizes = {size: ROUTE_TOKENS for size in ROUTE}
    rows: list[Row] = []
    wrong: list[dict[str, str | float]] = []
    for (n, k), tokens in sizes.items():
        for m in tokens:
            if arguments.only not in f"{n}x{k} m={m}":
                continue
            if arguments.route:
                latest = measure(route_candidates(m, n, k, ROUTE[n, k], device), device=device)
            else:
                latest = measure(candidates(m, n, k, terms, device, arguments.decode), device=device)
                wrong += errors(m, n, k, terms, device)
            rows += latest
            show(latest)
    if arguments.json:
        document = results(rows, {"hpc_router_gemm": _C.build_info()}, device)
        write_results(arguments.json, {**document, "rows": document["rows"] + wrong})


if __name__ == "__main__":
    main()
