"""Scores: values against float64 and against torch's fp32 matmul, shapes and strides, and what must not matter."""

import hpc_router_gemm
import pytest
import torch
from hpc_common.metrics import error
from hpc_common.poison import bits
from hpc_common.reference import router as reference
from hpc_common.testing import device_params
from hpc_router_gemm import RouterWeight, linear, router_gemm, split_terms
from hpc_router_gemm import _cpu as cpu
from hpc_router_gemm.support import SUPPORT
from hypothesis import given
from hypothesis import strategies as st

DEVICES = device_params(SUPPORT, "router_gemm", "fp32 weight, terms 1 to 3")
LINEAR_DEVICES = device_params(SUPPORT, "linear", "fp32 weight, terms 1 to 3")
BF16_DEVICES = device_params(SUPPORT, "router_gemm", "bf16 weight")
pytestmark = pytest.mark.usefixtures("one_thread")


def made(m: int, n: int, k: int, device: str = "cpu", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard-normal x [m, k] bf16 and weight [n, k] fp32, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((m, k), generator=generator).to(torch.bfloat16)
    return x.to(device), torch.randn((n, k), generator=generator).to(device)


def wide_range(shape: tuple[int, int], seed: int, binades: int = 60) -> torch.Tensor:
    """fp32 values whose exponents spread over many binades, zeros among them: no float64 order of adding is exact."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-binades // 2, binades // 2, shape, generator=generator)
    value = torch.ldexp(torch.randn(shape, generator=generator), exponent)
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, value)


def cancelling(m: int, n: int, k: int, seed: int, binades: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 and weight fp32 of a wide range, with large products that cancel: what is left shows the order of adding,
    for in any precision the small products lose bits to the large partial sum that stands when they are added."""
    x, weight = wide_range((m, k), seed, binades).bfloat16(), wide_range((n, k), seed + 1, binades)
    up, down = torch.randperm(k, generator=torch.Generator().manual_seed(seed))[: k // 4 * 2].view(2, -1)
    x[:, down] = x[:, up]
    large = torch.ldexp(weight[:, up], torch.tensor(binades // 2))
    weight[:, up], weight[:, down] = large, -large
    return x, weight


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a.contiguous()), bits(b.contiguous()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 3, 17, 64, 130])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (2, 64), (7, 120), (64, 136), (65, 1000), (200, 264), (192, 2048)])
def test_scores_keep_the_error_bound(m: int, n: int, k: int, terms: int, device: str) -> None:
    x, weight = made(m, n, k, device, seed=m + n + k)
    result = router_gemm(x, RouterWeight(weight, terms))
    assert result.shape == (m, n) and result.dtype == torch.float32
    # Independent of the reference: a plain float64 matmul agrees to what the terms keep (2^-9, 2^-17, fp32's error).
    # An fp32 one on the same device would add its own error to the kernel's.
    exact = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(result, exact, rtol=0, atol={1: 2e-2, 2: 1e-4, 3: 2e-6}[terms] * k**0.5)
    difference = result.cpu().double() - reference.scores(x, weight)
    rms, largest = reference.pool(difference, x, weight, terms)
    assert rms <= 1 and largest <= 1


@pytest.mark.parametrize("device", BF16_DEVICES)
def test_a_bf16_weight_is_one_exact_term(device: str) -> None:
    x, weight = made(33, 70, 520, device)
    weight = weight.to(torch.bfloat16)
    w = RouterWeight(weight, terms=3)
    assert w.terms == 1
    f = float(reference.rounding_floor(x, weight).max())
    wanted = reference.scores(x, weight)
    for result in (router_gemm(x, w), linear(x, weight)):
        assert error(result, wanted).rms <= f and error(result, wanted).max_abs <= 6 * f


@pytest.mark.parametrize("device", LINEAR_DEVICES)
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_linear_gives_the_scores_of_a_router_weight(terms: int, device: str) -> None:
    x, weight = made(19, 130, 392, device)
    result = linear(x, weight, terms)
    rms, largest = reference.pool(result.cpu().double() - reference.scores(x, weight), x, weight, terms)
    assert rms <= 1 and largest <= 1
    if device == "cpu":
        assert same_bits(result, router_gemm(x, RouterWeight(weight, terms)))


@pytest.mark.parametrize("device", LINEAR_DEVICES)
def test_linear_has_three_terms_unless_told(device: str) -> None:
    x, weight = made(5, 40, 256, device)
    assert same_bits(linear(x, weight), linear(x, weight, terms=3))
    assert not same_bits(linear(x, weight), linear(x, weight, terms=2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["padded rows", "every other row", "one row repeated", "offset"])
def test_strides_of_x(kind: str, device: str) -> None:
    dense, weight = made(12, 40, 264, device)
    big = torch.full((24, 288), float("nan"), dtype=torch.bfloat16, device=device)  # what lies between is poison
    if kind == "padded rows":
        x = big[:12, :264]
        x.copy_(dense)
    elif kind == "every other row":
        x = big[::2, :264]
        x.copy_(dense)
    elif kind == "offset":
        x = big[3:15, 24:]
        x.copy_(dense)
    else:
        x = dense[:1].expand(12, 264)
    w = RouterWeight(weight)
    assert same_bits(router_gemm(x, w), router_gemm(x.contiguous(), w))


@pytest.mark.parametrize("device", LINEAR_DEVICES)
def test_strides_of_a_weight(device: str) -> None:
    x, weight = made(6, 30, 128, device)
    big = torch.full((60, 160), float("nan"), device=device)
    view = big[::2, 32:]
    view.copy_(weight)
    assert same_bits(linear(x, view), linear(x, weight))
    transposed = weight.T.contiguous().T  # column-major: RouterWeight copies it, linear refuses it
    assert same_bits(router_gemm(x, RouterWeight(transposed)), router_gemm(x, RouterWeight(weight)))
    with pytest.raises(ValueError, match="weight: expected a dense last dimension"):
        linear(x, transposed)


@pytest.mark.parametrize("device", DEVICES)
def test_out_is_written_whole_and_nothing_beside_it(device: str, canary) -> None:
    x, weight = made(9, 77, 128, device)
    w = RouterWeight(weight)
    out = canary((9, 77), torch.float32, device).fill_(float("nan"))
    assert router_gemm(x, w, out=out) is out
    assert same_bits(out, router_gemm(x, w))


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens(device: str) -> None:
    x, weight = made(0, 20, 64, device)
    w = RouterWeight(weight)
    assert router_gemm(x, w).shape == (0, 20) and router_gemm(x, w).dtype == torch.float32
    assert linear(x, weight).shape == (0, 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_of_x_stays_in_its_row(value: float, terms: int, device: str) -> None:
    x, weight = made(21, 50, 520, device)
    w = RouterWeight(weight, terms)
    clean = router_gemm(x, w)
    x[13, 300] = value
    dirty = router_gemm(x, w)
    others = torch.arange(21, device=device) != 13
    assert same_bits(clean[others], dirty[others])
    assert not dirty[13].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_a_bad_weight_row_stays_in_its_column_and_does_as_fp32_would(terms: int, device: str) -> None:
    x, weight = made(10, 24, 264, device)
    x[4, 100] = 0  # Inf * 0
    clean = router_gemm(x, RouterWeight(weight, terms))
    weight[3, 100], weight[7, 100], weight[20, 5] = float("inf"), -float("inf"), float("nan")
    dirty = router_gemm(x, RouterWeight(weight, terms))
    good = [n for n in range(24) if n not in (3, 7, 20)]
    assert same_bits(clean[:, good], dirty[:, good])
    torch.testing.assert_close(dirty[:, [3, 7, 20]], (x.float() @ weight.T)[:, [3, 7, 20]], equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("values", ["normal", "wide"])
def test_equal_weight_rows_give_bit_equal_scores(values: str, terms: int, device: str) -> None:
    n, k = 203, 392
    for m in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 129, 257, 1024):
        if values == "wide" and device == "cpu" and m > 33:
            break  # a CPU adds those element by element
        x, weight = made(m, n, k, device, seed=m)
        if values == "wide":
            x, weight = (tensor.to(device) for tensor in cancelling(m, n, k, m))
        twins = torch.randperm(n, generator=torch.Generator().manual_seed(m))[:12].tolist() + [0, n - 1]
        weight[twins] = weight[twins[0]].clone()
        result = router_gemm(x, RouterWeight(weight, terms))
        assert same_bits(result[:, twins], result[:, twins[:1]].expand(-1, len(twins))), m


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("values", ["normal", "wide"])
def test_batch_invariant_rows_do_not_depend_on_the_batch(values: str, terms: int, device: str) -> None:
    n, k = 50, 328
    x, weight = made(300, n, k, device)
    if values == "wide":
        x, weight = (tensor.to(device) for tensor in cancelling(300, n, k, 1))
    w = RouterWeight(weight, terms)
    whole = router_gemm(x, w, batch_invariant=True)
    for m in (1, 2, 7, 8, 9, 16, 33, 64, 128, 255):
        part = router_gemm(x[300 - m :], w, batch_invariant=True)
        assert same_bits(part, whole[300 - m :]), m
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    assert same_bits(router_gemm(x[order], w, batch_invariant=True), whole[order])


@pytest.mark.parametrize("spread", [8, 13, 14, 15, 16, 17, 18, 20, 40])
def test_cpu_block_sums_have_no_order_down_to_the_last_bit_of_float64(spread: int) -> None:
    """At every spread of exponents, below, at and above the limit of what float64 adds exactly."""
    m, n, k = 9, 120, 256
    generator = torch.Generator().manual_seed(spread)
    x, term = (torch.rand((rows, k), generator=generator) + 1 for rows in (m, n))
    term *= torch.randint(0, 2, (n, k), generator=generator) * 2 - 1
    small = torch.rand(k, generator=generator) < 0.5  # in x and the weight alike, so that products spread twice as far
    x, term = (torch.where(small, rows * 2.0**-spread, rows).bfloat16() for rows in (x, term))
    operands = (x.double(), cpu.exponent_spread(x)), (term.double(), cpu.exponent_spread(term))
    (x64, x_spread), (term64, term_spread) = operands
    whole = cpu._block_product(x64, x_spread, term64, term_spread)
    for i in range(m):  # a product with one row takes another way through a BLAS
        row = cpu._block_product(x64[i : i + 1], x_spread[i : i + 1], term64, term_spread)
        assert same_bits(row, whole[i : i + 1])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    assert same_bits(cpu._block_product(x64, x_spread, term64[order], term_spread[order]), whole[:, order])


@given(
    m=st.integers(1, 40),
    n=st.integers(2, 90),
    k=st.integers(1, 70).map(lambda v: 8 * v),
    terms=st.sampled_from([1, 2, 3]),
    binades=st.sampled_from([2, 20, 60, 100]),
    seed=st.integers(0, 2**31 - 1),
)
def test_a_score_depends_on_its_two_rows_alone(m: int, n: int, k: int, terms: int, binades: int, seed: int) -> None:
    x, weight = cancelling(m, n, k, seed, binades)
    result = router_gemm(x, RouterWeight(weight, terms))
    row, column = seed % m, (seed // 7) % n
    alone = router_gemm(x[row : row + 1], RouterWeight(weight[column : column + 1], terms))
    assert same_bits(alone, result[row : row + 1, column : column + 1])
    # One rounding to fp32, and float64's own: each addition at most 2^-53 of sum |x||w|.
    split = torch.stack(reference.split_terms(weight, terms)).sum(0)
    wanted, size = reference.scores(x, split), reference.scores(x.abs(), split.abs())
    difference = (result.double() - wanted).abs()
    assert bool((difference <= 2.0**-24 * wanted.abs() + 2.0**-53 * 4 * k * size + 2.0**-149).all())


@pytest.mark.parametrize("device", DEVICES)
def test_repeats_are_bit_identical(device: str) -> None:
    x, weight = made(8, 96, 512, device)
    w = RouterWeight(weight)
    first = router_gemm(x, w)
    assert all(same_bits(first, router_gemm(x, w)) for _ in range(1000 if device == "cuda" else 100))


@pytest.mark.parametrize("device", DEVICES)
def test_three_terms_keep_the_order_of_rows_one_ulp_apart(device: str) -> None:
    k = 264
    generator = torch.Generator().manual_seed(5)
    low = torch.randn((40, k), generator=generator) * torch.logspace(-20, 20, 40)[:, None]
    high = torch.nextafter(low, torch.tensor(float("inf")))
    one_hot = torch.eye(k, dtype=torch.bfloat16, device=device)
    scores = router_gemm(one_hot, RouterWeight(torch.cat([low, high]).to(device), terms=3)).cpu()
    assert bool((scores[:, :40] < scores[:, 40:]).all())
    assert torch.equal(scores[:, :40].T, low)  # one-hot: the weight itself, all 24 bits


def test_routing_weights_own_their_memory() -> None:
    x, weight = made(4, 10, 64)
    w = RouterWeight(weight)
    before = router_gemm(x, w)
    weight.zero_()
    assert same_bits(router_gemm(x, w), before)


@pytest.mark.parametrize("device", DEVICES)
def test_update_is_in_place_and_reaches_everything_derived(device: str) -> None:
    x, weight = made(4, 10, 64, device)
    _, new = made(4, 10, 64, device, seed=9)
    w = RouterWeight(weight)
    address, split = w.weight.data_ptr(), w.presplit()
    split_address = split.data_ptr()
    assert w.update_(new) is w
    assert (w.weight.data_ptr(), w.presplit().data_ptr()) == (address, split_address)
    assert same_bits(router_gemm(x, w), router_gemm(x, RouterWeight(new)))
    assert all(same_bits(a, b) for a, b in zip(w.presplit(), split_terms(new, 2), strict=True))
    assert w.presplit().shape == (2, 10, 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [8, 64, 128, 200])
def test_three_terms_lie_in_chunks_of_k(k: int, device: str) -> None:
    _, weight = made(1, 10, k, device)
    _, new = made(1, 10, k, device, seed=9)
    w = RouterWeight(weight, terms=3)
    for now in (weight, new):
        chunks = w.update_(now).presplit()
        assert chunks.shape == (-(-k // 64), 3, 10, 64) and chunks.is_contiguous()
        rows = chunks.permute(1, 2, 0, 3).reshape(3, 10, -1)
        assert all(same_bits(a, b) for a, b in zip(rows[:, :, :k], split_terms(now, 3), strict=True))
        assert not rows[:, :, k:].any()


def test_updated_is_set_by_an_update_and_cleared_by_the_next_call() -> None:
    x, weight = made(2, 6, 16)
    w = RouterWeight(weight)
    assert w.updated
    router_gemm(x, w)
    assert not w.updated
    w.update_(weight)
    assert w.updated
    hpc_router_gemm.route(x, w, 2)
    assert not w.updated


@given(st.lists(st.floats(width=32), min_size=8, max_size=64), st.sampled_from([1, 2, 3]))
def test_split_is_the_references_for_every_fp32(values: list[float], terms: int) -> None:
    weight = torch.tensor(values, dtype=torch.float32)
    ours = [term.double() for term in split_terms(weight, terms)]
    for mine, theirs in zip(ours, reference.split_terms(weight, terms), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    kept = weight.isfinite() & (weight.abs() >= 2.0**-110)
    if terms == 3:
        assert torch.equal(torch.stack(ours).sum(0)[kept], weight.double()[kept])


def test_split_saturates_and_keeps_what_is_not_finite() -> None:
    largest = torch.finfo(torch.float32).max
    weight = torch.tensor([largest, -largest, float("inf"), float("nan")])
    hi, lo = split_terms(weight, 2)
    assert hi[:2].tolist() == [reference.BF16_MAX, -reference.BF16_MAX] and lo[0] > 0 > lo[1]
    assert hi[2] == float("inf") and bool(hi[3].isnan()) and lo[2:].tolist() == [0, 0]
