"""The promised error bounds, for weights of every scale, and proof that these tests catch what would break them.

Bounds (s: exact error of the split, f = 2^-23 sqrt(K) rms(x) rms(weight row)): two terms, rms <= 1.15 rms(s) + f and
largest <= 1.5 max|s| + 6 f, for rows of each scale apart; three terms, rms and largest at most an fp32 matmul's.
"""

from collections.abc import Callable

import pytest
import torch
from hpc_common.metrics import error
from hpc_common.reference import router as reference
from hpc_common.testing import device_params
from hpc_router_gemm import RouterWeight, linear, router_gemm, split_terms
from hpc_router_gemm import _cpu as cpu
from hpc_router_gemm.support import SUPPORT

DEVICES = device_params(SUPPORT, "router_gemm", "fp32 weight, terms 1 to 3")
LINEAR_DEVICES = device_params(SUPPORT, "linear", "fp32 weight, terms 1 to 3")
pytestmark = pytest.mark.usefixtures("one_thread")

# (scale of the weight rows, scale of x that keeps fp32 scores normal and finite)
SCALES = {
    "normal": (1.0, 1.0),
    "row by 1e4": (1e4, 1.0),
    "row by 1e-6": (1e-6, 1.0),
    "denormal": (2.0**-131, 2.0**30),
    "near the largest finite": (8e37, 2.0**-14),
}


def made(m: int, n: int, k: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((m, k), generator=generator).to(torch.bfloat16)
    return x.to(device), torch.randn((n, k), generator=generator).to(device)


def heavy(n: int, k: int, seed: int) -> torch.Tensor:
    """Student-t weights with two degrees of freedom: a few per row are a hundred times the others."""
    generator = torch.Generator().manual_seed(seed)
    normal, chi = torch.randn((n, k), generator=generator), torch.randn((n, k, 2), generator=generator)
    return normal / chi.square().mean(2).sqrt()


def used_up(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, terms: int) -> tuple[float, float]:
    """Shares of the bound that a result uses: (rms, largest)."""
    return reference.pool(result.cpu().double() - reference.scores(x, weight), x, weight, terms)


def in_bounds(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, terms: int) -> bool:
    return max(used_up(result, x, weight, terms)) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("values", ["normal", "heavy"])
def test_bound_of_each_row_scale(values: str, scale: str, terms: int, device: str) -> None:
    by, x_by = SCALES[scale]
    x, weight = made(128, 64, 2048, device, seed=11)
    if values == "heavy" and scale != "near the largest finite":  # a heavy tail there would not be finite
        weight = heavy(64, 2048, 12).to(device)
    if scale == "near the largest finite":
        weight.clamp_(-4, 4)
    x, weight = x * x_by, weight * by
    assert bool(weight.isfinite().all())
    assert in_bounds(router_gemm(x, RouterWeight(weight, terms)), x, weight, terms)


@pytest.mark.parametrize("device", DEVICES)
def test_bound_of_rows_that_share_a_matrix(device: str) -> None:
    x, weight = made(128, 96, 1024, device, seed=3)
    kinds = ["normal", "row by 1e4", "row by 1e-6", "denormal"]
    for index, kind in enumerate(kinds):
        weight[index::4] *= SCALES[kind][0]
    x = x * 2.0**10  # lifts the denormal rows' scores into fp32's normal range
    result = router_gemm(x, RouterWeight(weight))
    for index in range(4):
        assert in_bounds(result[:, index::4], x, weight[index::4], 2), kinds[index]


@pytest.mark.parametrize("device", LINEAR_DEVICES)
@pytest.mark.parametrize("scale", ["normal", "row by 1e4", "row by 1e-6", "near the largest finite"])
@pytest.mark.parametrize(("m", "n", "k"), [(512, 256, 6144), (2048, 64, 520), (2000, 100, 64), (8192, 16, 8)])
def test_three_terms_are_at_least_as_good_as_an_fp32_matmul(m: int, n: int, k: int, scale: str, device: str) -> None:
    if k == 6144 and scale != "normal":
        m, k = 1024, 1024
    x, weight = made(m, n, k, device, seed=k)
    weight.clamp_(-4, 4)
    by, x_by = SCALES[scale]
    x, weight = x * x_by, weight * by
    assert m * n >= 10**5
    wanted = reference.scores(x, weight)
    theirs = error(x.float() @ weight.T, wanted)
    for result in (router_gemm(x, RouterWeight(weight, terms=3)), linear(x, weight)):
        ours = error(result, wanted)
        assert ours.rms <= theirs.rms and ours.max_abs <= theirs.max_abs


@pytest.mark.parametrize("device", LINEAR_DEVICES)
def test_three_terms_are_at_least_as_good_as_an_fp32_matmul_on_heavy_tails(device: str) -> None:
    x, _ = made(1024, 1, 1024, device, seed=8)
    weight = heavy(128, 1024, 9).to(device)
    wanted = reference.scores(x, weight)
    ours, theirs = error(linear(x, weight), wanted), error(x.float() @ weight.T, wanted)
    assert ours.rms <= theirs.rms and ours.max_abs <= theirs.max_abs


# ---- What the bounds must catch: faults planted in the split, one at a time. ----


# A fault takes the terms of one block of K, and how much of K is left from the block's start.
Fault = Callable[[list[torch.Tensor], int], list[torch.Tensor]]


def none(terms: list[torch.Tensor], left: int) -> list[torch.Tensor]:
    return terms


def no_lo(terms: list[torch.Tensor], left: int) -> list[torch.Tensor]:
    return [terms[0], *(torch.zeros_like(term) for term in terms[1:])]


def lo_by_255_256(terms: list[torch.Tensor], left: int) -> list[torch.Tensor]:
    return [terms[0], *((term.float() * (255 / 256)).bfloat16() for term in terms[1:])]


def lo_lacks_the_last_tile(tile: int) -> Fault:
    def fault(terms: list[torch.Tensor], left: int) -> list[torch.Tensor]:
        keep = (left - torch.arange(terms[0].shape[1]) > tile).to(torch.bfloat16)
        return [terms[0], *(term * keep for term in terms[1:])]

    return fault


def truncated_hi(weight: torch.Tensor, terms: int) -> list[torch.Tensor]:
    """Two terms with hi cut towards zero (the upper 16 bits of the fp32 weight) and lo what that leaves, rounded."""
    hi = (weight.view(torch.int32) & -65536).view(torch.float32)
    return [hi.bfloat16(), (weight - hi).bfloat16()]


def last_term_missing(terms: list[torch.Tensor], left: int) -> list[torch.Tensor]:
    return [*terms[:-1], torch.zeros_like(terms[-1])]


HIDDEN = 6144
FAULTS: dict[str, Fault] = {
    "none": none,
    "lo dropped": no_lo,
    "lo scaled by 255/256": lo_by_255_256,
    "last 128 of K of lo missing": lo_lacks_the_last_tile(128),
    "last 64 of K of lo missing": lo_lacks_the_last_tile(64),
    "last 16 of K of lo missing": lo_lacks_the_last_tile(16),
}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault, hidden: int) -> None:
    """Make the CPU implementation split its blocks of K, which come in order, with ``fault``."""
    left = [hidden]

    def faulty(weight: torch.Tensor, terms: int) -> list[torch.Tensor]:
        result = fault(split_terms(weight, terms), left[0])
        left[0] -= weight.shape[1]
        return result

    monkeypatch.setattr(cpu, "split_terms", faulty)


@pytest.mark.parametrize("values", ["normal", "heavy"])
@pytest.mark.parametrize("fault", FAULTS)
def test_two_terms_bound_catches_a_fault_in_the_split(fault: str, values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = made(64, 64, HIDDEN, "cpu", seed=21)
    if values == "heavy":
        weight = heavy(64, HIDDEN, 22)
    plant(monkeypatch, FAULTS[fault], HIDDEN)
    assert in_bounds(router_gemm(x, RouterWeight(weight)), x, weight, 2) == (fault == "none")


@pytest.mark.parametrize("fault", [*FAULTS, "third term missing"])
def test_three_terms_bound_catches_a_fault_in_the_split(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = made(800, 128, 1024, "cpu", seed=23)
    wanted = reference.scores(x, weight)
    theirs = error(x.float() @ weight.T, wanted)
    plant(monkeypatch, FAULTS.get(fault, last_term_missing), 1024)
    ours = error(router_gemm(x, RouterWeight(weight, terms=3)), wanted)
    assert (ours.rms <= theirs.rms and ours.max_abs <= theirs.max_abs) == (fault == "none")


def test_rounding_hi_halves_the_error_of_truncating_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = made(64, 64, 2048, "cpu", seed=24)
    wanted = reference.scores(x, weight)
    rounded = error(router_gemm(x, RouterWeight(weight)), wanted)
    monkeypatch.setattr(cpu, "split_terms", truncated_hi)
    truncated = error(router_gemm(x, RouterWeight(weight)), wanted)
    assert 1.7 < truncated.rms / rounded.rms < 2.5


# ---- What the bounds must catch: an accumulator that truncates, as tensor cores do, and is not promoted. ----


def towards_zero(values: torch.Tensor) -> torch.Tensor:
    """float64 values cut to fp32's 24 bits (normal range)."""
    return (values.view(torch.int64) & -(1 << 29)).view(torch.float64)


def tensor_core(x: torch.Tensor, weight: torch.Tensor, terms: int, block: int, smallest_first: bool) -> torch.Tensor:
    """Scores as a tensor core makes them: 16 of K a step, the sum cut to 24 bits after each.

    The accumulator takes ``block`` of K of every term and is then added to an fp32 sum, rounded to nearest (promotion);
    block = K is the unpromoted sum.
    """
    parts = [term.double() for term in split_terms(weight, terms)]
    if smallest_first:
        parts.reverse()
    x = x.double()
    total = torch.zeros((x.shape[0], weight.shape[0]), dtype=torch.float32)
    for k in range(0, x.shape[1], block):
        accumulator = torch.zeros(total.shape, dtype=torch.float64)
        for part in parts:
            for step in range(k, min(k + block, x.shape[1]), 16):
                accumulator = towards_zero(accumulator + x[:, step : step + 16] @ part[:, step : step + 16].T)
        total += accumulator.float()
    return total


@pytest.mark.parametrize(("block", "good"), [(128, True), (256, True), (HIDDEN, False)])
def test_two_terms_bound_catches_an_unpromoted_sum(block: int, good: bool) -> None:
    x, weight = made(128, 128, HIDDEN, "cpu", seed=31)
    assert in_bounds(tensor_core(x, weight, 2, block, smallest_first=True), x, weight, 2) == good


@pytest.mark.parametrize(
    ("block", "smallest_first", "good"), [(128, True, True), (128, False, False), (HIDDEN, True, False)]
)
def test_three_terms_bound_catches_an_unpromoted_sum_and_the_wrong_order(
    block: int, smallest_first: bool, good: bool
) -> None:
    x, weight = made(400, 256, HIDDEN, "cpu", seed=32)
    wanted = reference.scores(x, weight)
    ours = error(tensor_core(x, weight, 3, block, smallest_first), wanted)
    theirs = error(x.float() @ weight.T, wanted)
    # The rms only: the largest of 10^5 differences between two fp32 orders is a matter of the BLAS at hand.
    assert (ours.rms <= theirs.rms) == good
