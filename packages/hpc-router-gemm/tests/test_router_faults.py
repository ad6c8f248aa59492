"""Faults that users of such operators reported, each as the kind of fault it is."""

import json
import pathlib

import pytest
import torch
from hpc_common.poison import bits, dirty_
from hpc_common.reference import router as reference
from hpc_common.testing import device_params
from hpc_router_gemm import RouterWeight, linear, route, router_gemm
from hpc_router_gemm.support import SUPPORT

FP32 = "fp32 weight, terms 1 to 3"
DEVICES = device_params(SUPPORT, "router_gemm", FP32)
LINEAR_DEVICES = device_params(SUPPORT, "linear", FP32)
ROUTE_DEVICES = device_params(SUPPORT, "route", FP32)
GPU_ONLY = [param for param in DEVICES if param != "cpu"]
pytestmark = pytest.mark.usefixtures("one_thread")


def made(m: int, n: int, k: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((m, k), generator=generator).to(torch.bfloat16)
    return x.to(device), torch.randn((n, k), generator=generator).to(device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a.contiguous()), bits(b.contiguous()))


# ---- R1: a copy derived from the weight goes stale after an online update ----


@pytest.mark.parametrize("device", LINEAR_DEVICES)
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_r1_linear_reads_the_weight_of_this_call(terms: int, device: str) -> None:
    x, weight = made(16, 40, 256, device)
    _, new = made(16, 40, 256, device, seed=1)
    linear(x, weight, terms)
    address = weight.data_ptr()
    weight.copy_(new)  # in place: same tensor, same address, same version of everything a cache could be keyed by
    assert weight.data_ptr() == address
    assert same_bits(linear(x, weight, terms), linear(x, new.clone(), terms))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_r1_a_router_weight_is_updated_by_its_owner(terms: int, device: str) -> None:
    x, weight = made(16, 40, 256, device)
    _, new = made(16, 40, 256, device, seed=1)
    w = RouterWeight(weight, terms)
    old_scores, old_ids = router_gemm(x, w), route(x, w, 4)[0]
    w.update_(new)
    fresh = RouterWeight(new, terms)
    assert same_bits(router_gemm(x, w), router_gemm(x, fresh)) and torch.equal(route(x, w, 4)[0], route(x, fresh, 4)[0])
    w.update_(weight)
    assert same_bits(router_gemm(x, w), old_scores) and torch.equal(route(x, w, 4)[0], old_ids)


@pytest.mark.gpu
@pytest.mark.parametrize("device", GPU_ONLY)
@pytest.mark.parametrize("terms", [2, 3])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 40, 256), (300, 384, 3072), (1024, 192, 4096), (2048, 192, 4096)])
def test_r1_an_update_reaches_a_graph_captured_before_it(m: int, n: int, k: int, terms: int, device: str) -> None:
    """With few tokens the graph reads the weight itself, with many its terms."""
    x, weight = made(m, n, k, device)
    _, new = made(1, n, k, device, seed=1)
    w = RouterWeight(weight, terms)
    out = torch.empty((m, n), device=device)
    router_gemm(x, w, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        router_gemm(x, w, out=out)
    for now in (new, weight, new):
        w.update_(now)
        graph.replay()
        assert same_bits(out, router_gemm(x, RouterWeight(now, terms)))


# ---- R2, R3: scores rounded to bf16 choose other experts ----


@pytest.mark.parametrize("device", ROUTE_DEVICES)
def test_r2_no_expert_differs_where_the_gap_exceeds_the_bound(device: str) -> None:
    m, n, hidden, k = 512, 896, 7168, 16
    x, weight = made(m, n, hidden, device)
    w = RouterWeight(weight, terms=2)
    scores, (ids, _) = router_gemm(x, w), route(x, w, k)
    assert scores.dtype == torch.float32
    exact = reference.scores(x, weight)
    top = exact.topk(k + 1)
    sure = top.values[:, k - 1] - top.values[:, k] > 2 * reference.score_bound(x, weight, 2)
    assert sure.sum() > 0.98 * m

    def differing(chosen: torch.Tensor) -> torch.Tensor:
        wanted = top.indices[:, :k].sort(1).values
        return (chosen.cpu().long().sort(1).values != wanted).any(1)

    for chosen in (ids, scores.topk(k).indices):
        assert not bool((differing(chosen) & sure).any())
    # The fault itself: the same scores stored in bf16.
    assert bool((differing(scores.bfloat16().float().topk(k).indices) & sure).any())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("terms", [2, 3])
def test_r3_order_of_scores_2_to_minus_10_apart(terms: int, device: str) -> None:
    hidden = 7168
    x, weight = made(64, 2, hidden, device, seed=3)
    exact = reference.scores(x, weight)
    # Turn row 1 into a copy of row 0 whose score is 2^-10 larger, for each token alone, where |score| >= 1.
    big = (exact[:, 0].abs() >= 1).nonzero().flatten().tolist()
    assert len(big) > 40
    low = weight[0].expand(len(big), -1)
    rows = x[big].float()
    step = exact[big, 0].abs().float().to(device) * 2.0**-10 / rows.square().sum(1)
    high = low + step[:, None] * rows
    pair = torch.cat([low, high])
    truth = reference.scores(x[big], pair)
    diagonal = torch.arange(len(big))
    gap = truth[diagonal, diagonal + len(big)] - truth[diagonal, diagonal]
    torch.testing.assert_close(gap, exact[big, 0].abs() * 2.0**-10, rtol=0.05, atol=0)
    scores = router_gemm(x[big], RouterWeight(pair, terms)).cpu()
    assert scores.dtype == torch.float32
    assert bool((scores[diagonal, diagonal] < scores[diagonal, diagonal + len(big)]).all())


# ---- R5: two identical forwards differ ----


@pytest.mark.parametrize("device", DEVICES)
def test_r5_repeats_are_bit_identical(device: str) -> None:
    x, weight = made(8, 768, 6144, device)
    w = RouterWeight(weight)
    first = router_gemm(x, w)
    assert all(same_bits(first, router_gemm(x, w)) for _ in range(1000 if device == "cuda" else 5))


@pytest.mark.parametrize("device", DEVICES)
def test_r5_a_row_at_other_batch_sizes(device: str) -> None:
    x, weight = made(1024, 192, 1024, device)
    w = RouterWeight(weight)
    exact = reference.scores(x[:1], weight)
    bound = reference.bounds(x, weight, 2).largest
    invariant = router_gemm(x[:1], w, batch_invariant=True)
    for m in (1, 8, 64, 1024):
        assert same_bits(router_gemm(x[:m], w, batch_invariant=True)[:1], invariant)
        assert bool(((router_gemm(x[:m], w)[0].cpu() - exact[0]).abs() <= bound).all())


# ---- R7: state kept in a workspace between calls, streams and shapes ----


@pytest.mark.parametrize("device", DEVICES)
def test_r7_calls_of_other_shapes_leave_nothing_behind(device: str) -> None:
    problems = [made(m, n, k, device, seed=n) for m, n, k in [(40, 192, 512), (3, 768, 256), (200, 40, 1024)]]
    weights = [RouterWeight(weight) for _, weight in problems]
    first = [router_gemm(x, w) for (x, _), w in zip(problems, weights, strict=True)]
    for _ in range(3):
        dirty_(torch.empty(2**22, dtype=torch.uint8, device=device))  # what the allocator hands out next
        for (x, _), w, wanted in reversed(list(zip(problems, weights, first, strict=True))):
            assert same_bits(router_gemm(x, w), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_r7_two_hundred_thousand_tokens(device: str) -> None:
    m = 200_000
    x, weight = made(m, 24, 64, device)
    w = RouterWeight(weight)
    scores = router_gemm(x, w, batch_invariant=True)
    assert scores.shape == (m, 24)
    rms, largest = reference.pool(scores.cpu().double() - reference.scores(x, weight), x, weight, 2)
    assert rms <= 1 and largest <= 1
    assert same_bits(scores[-3:], router_gemm(x[-3:], w, batch_invariant=True))


@pytest.mark.gpu
@pytest.mark.parametrize("device", GPU_ONLY)
def test_r7_two_streams_at_once(device: str) -> None:
    problems = [made(64, n, 6144, device, seed=n) for n in (192, 768)]
    weights = [RouterWeight(weight) for _, weight in problems]
    wanted = [router_gemm(x, w) for (x, _), w in zip(problems, weights, strict=True)]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[which].append(router_gemm(problems[which][0], weights[which]))
    torch.cuda.synchronize()
    assert all(same_bits(result, wanted[which]) for which in (0, 1) for result in results[which])


# ---- R8: few tokens slower than the library ----


def test_r8_no_decode_size_is_more_than_two_percent_slower_than_cublas_fp32() -> None:
    """What was measured beside cuBLAS fp32 in one run, M = 1 to 64 (benchmarks/results/h200_decode.json)."""
    results = pathlib.Path(__file__).parent.parent / "benchmarks" / "results" / "h200_decode.json"
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in json.loads(results.read_text())["rows"]:
        if row["mode"] == "cold" and row["op"] == "router-2":
            size, m = row["case"].split(" m=")
            times.setdefault((size, m), {})[row["provider"]] = row["us"]
    decode = {case: row for case, row in times.items() if int(case[1]) <= 64}
    sizes = {size for size, _ in decode}
    assert sizes == {"192x4096", "384x3072", "768x6144", "256x7168", "128x2048", "896x7168", "64x2048"}
    assert all({m for s, m in decode if s == size} >= {"1", "8", "16", "32", "64"} for size in sizes)
    assert all(row["ours"] <= 1.02 * row["cuBLAS fp32"] for row in decode.values())


# ---- R12: preconditions that every caller had to know ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 63, 200])
@pytest.mark.parametrize("m", [0, 1, 2, 15])
def test_r12_any_number_of_tokens_and_experts(m: int, n: int, device: str) -> None:
    x, weight = made(m, n, 6144, device)
    scores = router_gemm(x, RouterWeight(weight))
    assert scores.shape == (m, n) and scores.device == x.device
    if m:
        rms, largest = reference.pool(scores.cpu().double() - reference.scores(x, weight), x, weight, 2)
        assert rms <= 1 and largest <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("device", GPU_ONLY)
def test_r12_no_token_launches_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_router_gemm import _cuda

    x, weight = made(0, 200, 6144, device)
    w = RouterWeight(weight)
    for launcher in ("scores", "_cublas"):
        monkeypatch.setattr(_cuda, launcher, None)
    scores, (ids, weights), plain = router_gemm(x, w), route(x, w, 8), linear(x, weight)
    assert scores.shape == plain.shape == (0, 200) and ids.shape == weights.shape == (0, 8)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):  # that is where launches are
        router_gemm(x.new_zeros((1, 6144)), w)


@pytest.mark.parametrize("device", DEVICES)
def test_r12_a_stride_is_right_or_refused_here(device: str) -> None:
    big, weight = made(8, 200, 6144, device)
    w = RouterWeight(weight[:, :3072])
    with pytest.raises(ValueError, match="hpc_router_gemm.router_gemm: x: expected a dense last dimension"):
        router_gemm(big[:, ::2], w)
    assert same_bits(router_gemm(big[:, :3072], w), router_gemm(big[:, :3072].contiguous(), w))
    with pytest.raises(ValueError, match="hpc_router_gemm.RouterWeight: weight: expected K to be a positive multiple"):
        RouterWeight(weight[:, :3076])
