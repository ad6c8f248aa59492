"""What a call waits for on a GPU, and what runs beside it: predecessors that end late, streams, devices, graphs."""

import pytest
import torch
from hpc_common.poison import bits
from hpc_router_gemm import RouterWeight, linear, route, router_gemm

pytestmark = pytest.mark.gpu


def made(m: int, n: int, k: int, device: str = "cuda:0", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn((m, k), generator=generator, device=device).to(torch.bfloat16)
    return x, torch.randn((n, k), generator=generator, device=device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


# The second call's kernel: stream, then tile with one and with two k groups, with and without a split of k.
@pytest.mark.parametrize(
    ("m", "experts", "k", "terms"),
    [(m, 192, 512, 2) for m in (1, 16, 64, 208, 512, 1024, 2048)]
    + [(128, 384, 3072, 2), (128, 768, 6144, 3)],  # two rings; tokens are wgmma's rows
)
@pytest.mark.parametrize("captured", [False, True])
def test_x_comes_from_a_call_that_still_runs(m: int, experts: int, k: int, terms: int, captured: bool) -> None:
    """Each call lets the next one start while it runs itself; the next one's x is this one's scores.

    One-hot tokens pick columns of a bf16 weight, so the fp32 scores are bf16 values: their bits are a bf16 x of every
    second column zero. The first call's long K makes it late; each round picks other columns, so a stale x shows.
    """
    n, hidden = k // 2, 16384
    picked = torch.randn((n, hidden), device="cuda").to(torch.bfloat16).float()
    first, second = RouterWeight(picked), RouterWeight(torch.randn((experts, k), device="cuda"), terms)
    x = torch.zeros((m, hidden), device="cuda", dtype=torch.bfloat16)
    scores = torch.empty((m, n), device="cuda")
    out = torch.empty((m, experts), device="cuda")

    def chain() -> None:
        router_gemm(x, first, out=scores)
        router_gemm(scores.view(torch.bfloat16), second, out=out)

    chain()  # clears both `updated` flags: from here on the weights are read early
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            chain()
    for seed in range(12):
        hot = torch.randint(0, hidden, (m,), generator=torch.Generator().manual_seed(seed)).cuda()
        x.zero_()
        x[torch.arange(m, device="cuda"), hot] = 1
        torch.cuda.synchronize()
        graph.replay() if captured else chain()
        torch.cuda.synchronize()
        assert torch.equal(scores, picked[:, hot].T)
        assert same_bits(out, router_gemm(scores.view(torch.bfloat16).clone(), second))


@pytest.mark.parametrize("captured", [False, True])
def test_a_chain_of_three_terms(captured: bool) -> None:
    """Calls whose clusters find room beside their predecessor: it lets them start before it has ended."""
    for m, n, k in ((128, 768, 6144), (256, 384, 3072)):
        problems = [made(m, n, k, seed=seed) for seed in range(6)]
        weights = [RouterWeight(weight, terms=3) for _, weight in problems]
        want = [router_gemm(x, w) for (x, _), w in zip(problems, weights, strict=True)]
        out = [torch.empty_like(y) for y in want]

        def chain(problems=problems, weights=weights, out=out) -> None:
            for (x, _), w, y in zip(problems, weights, out, strict=True):
                router_gemm(x, w, out=y)

        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                chain()
        for _ in range(20):
            for y in out:
                y.zero_()
            graph.replay() if captured else chain()
            assert all(same_bits(a, b) for a, b in zip(out, want, strict=True))


@pytest.mark.parametrize("m", [1, 16, 64, 512])
@pytest.mark.parametrize("captured", [False, True])
def test_a_chain_of_routes(m: int, captured: bool) -> None:
    """Scores, choice, scores, choice, scores: each starts while the one before runs, and waits for what it reads.

    The first call's long K makes it late. The last one's x is the second choice's weights, whose bits are a bf16 x.
    """
    x, weight = made(m, 192, 16384)
    last = RouterWeight(torch.randn((256, 16), device="cuda"))
    w = RouterWeight(weight)
    flipped = RouterWeight(weight.flip(0).contiguous())

    def chain() -> list[torch.Tensor]:
        first, second = route(x, w, 8), route(x, flipped, 8)
        return [*first, *second, router_gemm(second[1].view(torch.bfloat16), last)]

    chain()  # clears the `updated` flags
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    got = []
    if captured:
        with torch.cuda.graph(graph):
            got = chain()
    for seed in range(12):
        x.copy_(made(m, 192, 16384, seed=seed)[0])
        torch.cuda.synchronize()
        if captured:
            graph.replay()
        else:
            got = chain()
        torch.cuda.synchronize()
        for chosen, of in ((got[:2], w), (got[2:4], flipped)):
            want = route(x, of, 8)
            torch.cuda.synchronize()
            assert torch.equal(chosen[0], want[0]) and same_bits(chosen[1], want[1])
        assert same_bits(got[4], router_gemm(got[3].clone().view(torch.bfloat16), last))


def test_a_weight_written_just_before_is_read_after_that() -> None:
    """update_ between calls of one stream, many times: the flag makes the call wait before it reads weights."""
    for m in (1, 64, 512, 2048):
        x, weight = made(m, 192, 4096)
        choices = [weight * scale for scale in (1.0, 2.0, 4.0)]
        want = [router_gemm(x, RouterWeight(choice)) for choice in choices]
        w = RouterWeight(weight)
        for round_ in range(30):
            w.update_(choices[round_ % 3])
            assert same_bits(router_gemm(x, w), want[round_ % 3])


def test_streams_at_once() -> None:
    """Calls of both kernels on six streams together, each weight and its x on two of them."""
    problems = [made(m, n, k, seed=n) for m, n, k in ((1, 768, 6144), (512, 192, 4096), (1024, 384, 3072))]
    weights = [RouterWeight(weight) for _, weight in problems]
    want = [router_gemm(x, w) for (x, _), w in zip(problems, weights, strict=True)]
    chosen = [route(x, w, 8) for (x, _), w in zip(problems, weights, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2 * len(problems))]
    torch.cuda.synchronize()
    got: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = [[] for _ in streams]
    for _ in range(40):
        for results, (which, stream) in zip(got, enumerate(streams), strict=True):
            with torch.cuda.stream(stream):
                x, w = problems[which % len(problems)][0], weights[which % len(problems)]
                results.append((router_gemm(x, w), *route(x, w, 8)))
    torch.cuda.synchronize()
    for which, results in enumerate(got):
        ids, probabilities = chosen[which % len(problems)]
        for result in results:
            assert same_bits(result[0], want[which % len(problems)])
            assert torch.equal(result[1], ids) and same_bits(result[2], probabilities)


def test_with_out_nothing_is_allocated() -> None:
    for m in (1, 64, 512, 2048):
        x, weight = made(m, 192, 4096)
        w = RouterWeight(weight)
        out = router_gemm(x, w)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        router_gemm(x, w, out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_the_second_gpu() -> None:
    """Tensors on cuda:1 while cuda:0 is current: same bits; tensors of two devices: refused."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for m in (1, 64, 512, 2048):
        x, weight = made(m, 192, 4096)
        here = [router_gemm(x, RouterWeight(weight)), linear(x, weight), *route(x, RouterWeight(weight), 8)]
        x1, weight1 = x.to("cuda:1"), weight.to("cuda:1")
        w1 = RouterWeight(weight1)
        there = [router_gemm(x1, w1), linear(x1, weight1), *route(x1, w1, 8)]
        assert torch.cuda.current_device() == 0
        assert all(each.device == x1.device for each in there)
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(here, there, strict=True))
        with pytest.raises(ValueError, match="hpc_router_gemm.router_gemm: x: expected device cuda:1"):
            router_gemm(x, w1)
