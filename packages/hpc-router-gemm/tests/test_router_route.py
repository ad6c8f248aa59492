"""The choice of experts: sets and weights against float64, groups, bias, ties and what is not a number."""

import math

import pytest
import torch
from hpc_common.poison import bits
from hpc_common.reference import router as reference
from hpc_common.testing import device_params
from hpc_router_gemm import RouterWeight, route, router_gemm
from hpc_router_gemm.support import SUPPORT
from hypothesis import given
from hypothesis import strategies as st

DEVICES = device_params(SUPPORT, "route", "fp32 weight, terms 1 to 3")
BF16_DEVICES = device_params(SUPPORT, "route", "bf16 weight")
pytestmark = pytest.mark.usefixtures("one_thread")


def made(m: int, n: int, k: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((m, k), generator=generator).to(torch.bfloat16)
    return x.to(device), (torch.randn((n, k), generator=generator) * k**-0.5).to(device)


def scores_as_given(scores: torch.Tensor, device: str = "cpu") -> tuple[torch.Tensor, RouterWeight]:
    """x and weight whose router scores are exactly ``scores`` [M, N] (fp32): one-hot rows and three terms.

    Scores may not be Inf or NaN, which would spread over a column.
    """
    m, n = scores.shape
    hidden = -(-m // 8) * 8
    weight = torch.zeros((n, hidden))
    weight[:, :m] = scores.T
    return torch.eye(m, hidden, dtype=torch.bfloat16, device=device), RouterWeight(weight.to(device), terms=3)


def assert_matches(ids, weights, wanted: reference.Route, sure: torch.Tensor) -> None:
    """Equal ids and close weights in the rows ``sure`` [M] marks; everywhere distinct ids."""
    ids, weights = ids.cpu(), weights.cpu().double()
    assert ids.dtype == torch.int32 and ids.shape == wanted.ids.shape
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    # Among the chosen, near ties may swap places: compare as sets, and weights by id.
    order, wanted_order = ids[sure].sort(1), wanted.ids[sure].sort(1)
    assert torch.equal(order.values.long(), wanted_order.values)
    torch.testing.assert_close(
        weights[sure].gather(1, order.indices), wanted.weights[sure].gather(1, wanted_order.indices), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "num_groups", "topk_groups"),
    [
        (1, 8, 2, 1, 1),
        (40, 64, 6, 8, 3),
        (40, 256, 8, 8, 4),
        (33, 60, 1, 1, 1),
        (17, 96, 12, 6, 1),
        (5, 7, 7, 1, 1),
        (9, 896, 16, 1, 1),
    ],
)
def test_route_equals_float64(
    m: int,
    n: int,
    k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    biased: bool,
    scoring: str,
    device: str,
) -> None:
    x, weight = made(m, n, 512, device, seed=n)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(device) * 0.1 if biased else None
    options = dict(
        scoring=scoring,
        bias=bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        renormalize=renormalize,
        scale=2.5,
    )
    ids, weights = route(x, RouterWeight(weight, terms=3), k, **options)
    wanted = reference.route(reference.scores(x, weight), k, **options)
    # Probabilities move by at most half as much as scores, and round at 2^-24; sums of two groups' best by twice that.
    slack = 2 * reference.score_bound(x, weight, 3) + 2.0**-22
    sure = (wanted.margin > slack) & (wanted.group_margin > slack)
    assert sure.sum() >= 0.9 * m  # the test says something
    assert_matches(ids, weights, wanted, sure)


@pytest.mark.parametrize("device", BF16_DEVICES)
def test_route_with_a_bf16_weight(device: str) -> None:
    x, weight = made(20, 64, 512, device)
    weight = weight.bfloat16()
    wanted = reference.route(reference.scores(x, weight), 4)
    assert_matches(*route(x, RouterWeight(weight), 4), wanted, wanted.margin > 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_best_first_and_weights_are_the_probabilities_of_the_ids(scoring: str, device: str) -> None:
    x, weight = made(30, 50, 256, device)
    w = RouterWeight(weight)
    scores = router_gemm(x, w)
    ids, weights = route(x, w, 5, scoring=scoring, renormalize=False, scale=3.0)
    probabilities = scores.softmax(1) if scoring == "softmax" else scores.sigmoid()
    torch.testing.assert_close(weights, 3 * probabilities.gather(1, ids.long()))
    assert bool((weights.diff(dim=1) <= 0).all())
    assert torch.equal(scores.gather(1, ids.long()), scores.topk(5).values)


@pytest.mark.parametrize("device", DEVICES)
def test_the_bias_moves_the_choice_and_not_the_weight(device: str) -> None:
    x, weight = made(6, 16, 64, device)
    w = RouterWeight(weight)
    bias = torch.zeros(16, device=device)
    bias[11] = 10.0
    ids, weights = route(x, w, 3, scoring="sigmoid", bias=bias, renormalize=False)
    assert ids[:, 0].tolist() == [11] * 6
    torch.testing.assert_close(weights[:, 0], router_gemm(x, w)[:, 11].sigmoid())
    same = torch.full((16,), 0.25, device=device)
    plain, shifted = route(x, w, 3, scoring="sigmoid"), route(x, w, 3, scoring="sigmoid", bias=same)
    assert torch.equal(plain[0], shifted[0]) and torch.equal(plain[1], shifted[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_bias_of_minus_inf_keeps_an_expert_out(biased: bool, device: str) -> None:
    x, weight = made(9, 12, 64, device)
    bias = torch.full((12,), -math.inf, device=device)
    bias[[2, 5, 9]] = 0.5 if biased else 0.0
    ids, _ = route(x, RouterWeight(weight), 3, bias=bias)
    assert all(set(row) == {2, 5, 9} for row in ids.tolist())
    ids, _ = route(x, RouterWeight(weight), 5, bias=bias)  # too few left: lower ids fill up
    assert all(row[3:] == [0, 1] for row in ids.tolist())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_group_counts_its_two_best(scoring: str, device: str) -> None:
    # Group 0 has the best expert, group 1 the best pair, group 2 the best sum of all four.
    scores = torch.tensor([[2.0, -9, -9, -9, 1.5, 1.4, -9, -9, 1.0, 1.0, 1.0, 1.0]])
    x, w = scores_as_given(scores, device)
    ids, _ = route(x, w, 2, scoring=scoring, num_groups=3, topk_groups=1)
    assert ids.tolist() == [[4, 5]]
    ids, _ = route(x, w, 4, scoring=scoring, num_groups=3, topk_groups=1)  # all of that group, and none of another
    assert ids.tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_ties_go_to_the_lower_id(scoring: str, biased: bool, device: str) -> None:
    k = 96
    x, weight = made(70, 40, k, device)
    weight[:] = weight[torch.arange(40, device=device) % 5].clone()  # experts i, i+5, i+10, ... are the same
    bias = torch.full((40,), 0.125, device=device) if biased else None
    w = RouterWeight(weight)
    ids, _ = route(x, w, 12, scoring=scoring, bias=bias)
    first = router_gemm(x, w)[:, :5].argsort(dim=1, descending=True, stable=True).cpu()
    wanted = [[*range(a, 40, 5), *range(b, 40, 5)][:12] for a, b, *_ in first.tolist()]
    assert ids.tolist() == wanted
    ids, _ = route(x, w, 3, scoring=scoring, bias=bias, num_groups=8, topk_groups=2)  # eight equal groups
    assert bool((ids < 10).all())


@pytest.mark.parametrize("device", DEVICES)
def test_scores_that_probabilities_round_together_still_choose(device: str) -> None:
    # In fp32 sigmoid(30) = sigmoid(29) = 1, and softmax puts -200 and -201 at 0.
    x, w = scores_as_given(torch.tensor([[29.0, 30.0, 0.0, -201.0, -200.0]]), device)
    assert route(x, w, 1, scoring="sigmoid")[0].tolist() == [[1]]
    assert route(x, w, 4, scoring="softmax")[0].tolist() == [[1, 0, 2, 4]]


@pytest.mark.parametrize("device", DEVICES)
def test_signed_zeros_are_equal(device: str) -> None:
    # -2^-160 and 2^-160 are -0 and 0 in fp32.
    x = torch.full((1, 8), 2.0**-80, dtype=torch.bfloat16, device=device)
    weight = torch.zeros((6, 8), device=device)
    weight[:, 0] = 2.0**-80
    weight[::2] *= -1
    assert route(x, RouterWeight(weight), 6)[0].tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_ids_stay_valid_and_rows_apart_when_a_row_is_bad(value: float, biased: bool, scoring: str, device: str) -> None:
    x, weight = made(8, 32, 64, device)
    w = RouterWeight(weight)
    bias = torch.linspace(0, 0.1, 32, device=device) if biased else None
    options = dict(scoring=scoring, bias=bias, num_groups=4, topk_groups=2)
    ids, weights = route(x, w, 6, **options)
    x[3, 7] = value
    bad_ids, bad_weights = route(x, w, 6, **options)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(bad_ids[others], ids[others])
    assert torch.equal(bits(bad_weights[others].contiguous()), bits(weights[others].contiguous()))
    row = bad_ids[3].tolist()
    assert len(set(row)) == 6 and all(0 <= i < 32 for i in row)
    if math.isnan(value):
        # Every value is NaN and so equal: the lowest ids of the two lowest groups.
        assert row == [0, 1, 2, 3, 4, 5] and bool(bad_weights[3].isnan().all())


@pytest.mark.parametrize("device", DEVICES)
def test_nan_experts_are_chosen_last(device: str) -> None:
    x, weight = made(5, 8, 64, device)
    weight[2], weight[6] = math.nan, math.nan
    ids, weights = route(x, RouterWeight(weight), 8, scoring="sigmoid", renormalize=False)
    assert all(row[6:] == [2, 6] for row in ids.tolist())
    assert bool(weights[:, :6].isfinite().all()) and bool(weights[:, 6:].isnan().all())
    bias = torch.zeros(8, device=device)
    bias[0] = -math.inf
    ids, _ = route(x, RouterWeight(weight), 8, scoring="sigmoid", bias=bias)
    assert all(row[5:] == [0, 2, 6] for row in ids.tolist())  # NaN is below -inf
    bias = torch.tensor([-9.0] * 4 + [0.0] * 4, device=device)
    ids, _ = route(x, RouterWeight(weight), 4, scoring="sigmoid", bias=bias, num_groups=2)
    assert all(set(row[:3]) == {4, 5, 7} and row[3] == 6 for row in ids.tolist())  # but above another group


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_sum_to_nothing_are_nothing(device: str) -> None:
    x, w = scores_as_given(torch.tensor([[0.0, -1e30, -1e30, 0.0]]), device)
    bias = torch.tensor([-math.inf, 0.0, 0.0, -math.inf], device=device)
    ids, weights = route(x, w, 2, bias=bias)
    assert ids.tolist() == [[1, 2]] and weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens(device: str) -> None:
    x, weight = made(0, 16, 64, device)
    ids, weights = route(x, RouterWeight(weight), 3, num_groups=4, topk_groups=2)
    assert ids.shape == weights.shape == (0, 3)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_one_expert(device: str) -> None:
    x, weight = made(3, 1, 8, device)
    ids, weights = route(x, RouterWeight(weight), 1, scale=1.5)
    assert ids.tolist() == [[0]] * 3 and weights.tolist() == [[1.5]] * 3


@st.composite
def problems(draw):
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    experts = groups * draw(st.integers(2 if groups > 1 else 1, 9))
    topk_groups = draw(st.integers(1, groups))
    k = draw(st.integers(1, experts // groups * topk_groups))
    # Few distinct scores, so that ties between experts and between groups are common.
    values = st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0])
    row = st.lists(values, min_size=experts, max_size=experts)
    scores = torch.tensor(draw(st.lists(row, min_size=1, max_size=5)))
    biases = st.lists(st.sampled_from([0.0, 0.25, -0.5, -math.inf]), min_size=experts, max_size=experts)
    bias = draw(st.none() | biases)
    return scores, k, groups, topk_groups, None if bias is None else torch.tensor(bias)


@given(problems(), st.sampled_from(["softmax", "sigmoid"]), st.booleans())
def test_choice_with_many_ties(problem, scoring: str, renormalize: bool) -> None:
    scores, k, groups, topk_groups, bias = problem
    x, w = scores_as_given(scores)
    options = dict(scoring=scoring, bias=bias, num_groups=groups, topk_groups=topk_groups, renormalize=renormalize)
    ids, weights = route(x, w, k, **options)
    wanted = reference.route(scores, k, **options)
    # Values that differ do so by far more than rounding, or by float64 noise that fp32 does not see.
    sure = ((wanted.margin == 0) | (wanted.margin > 1e-6) | wanted.margin.isnan()) & (
        (wanted.group_margin == 0) | (wanted.group_margin > 1e-6) | wanted.group_margin.isnan()
    )
    assert torch.equal(ids[sure].long(), wanted.ids[sure])
    torch.testing.assert_close(weights[sure].double(), wanted.weights[sure], rtol=1e-5, atol=0)
