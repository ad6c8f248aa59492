"""Expert parallelism: the ranks together do exactly what one rank does, row by row and in sum."""

from collections.abc import Callable
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_common.grouped import build_map
from hypothesis import given, settings
from hypothesis import strategies as st

CaseMaker = Callable[..., Any]


def check_sum(case: Any, ranks: int, whole: torch.Tensor) -> list[torch.Tensor]:
    """The ranks' partial results, whose sum equals ``whole`` within ranks + 1 bf16 roundings of the largest."""
    parts = [case.rank(rank, ranks).run() for rank in range(ranks)]
    largest = torch.stack([*parts, whole]).float().abs().amax(0)
    difference = (torch.stack(parts).double().sum(0) - whole.double()).abs()
    assert (difference <= (ranks + 1) * 2**-8 * largest).all()
    return parts


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [5, 60, 300])
def test_ranks_add_up(kind: tuple[str, str], ranks: int, tokens: int, moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=tokens, hidden=256, inter=192)
    whole = case.run()
    case.check(whole)
    for rank, part in enumerate(check_sum(case, ranks, whole)):
        case.rank(rank, ranks).check(part)


@pytest.mark.parametrize("tokens", [7, 60, 300])
def test_each_row_is_bit_identical_on_its_rank(kind: tuple[str, str], tokens: int, moe_case: CaseMaker) -> None:
    """With all weights 0 but one slot's 1, the output is that slot's row before the reduction."""
    ranks = 4
    case = moe_case(kind, tokens=tokens, hidden=256, inter=192)
    live = case.topk_ids >= 0
    for slot in range(4):
        weights = (torch.arange(4, device=case.x.device) == slot).float().expand(tokens, 4)
        one = case.but(topk_weights=weights)
        whole = one.run()
        for rank in range(ranks):
            own = live[:, slot] & (case.topk_ids[:, slot] // 2 == rank)
            part = one.rank(rank, ranks).run()
            assert part[own].equal(whole[own])
            assert (part[~own] == 0).all()


@settings(max_examples=max(settings.default.max_examples // 3, 2))
@given(
    tokens=st.integers(1, 120),
    ranks=st.sampled_from([1, 2, 4]),
    top_k=st.integers(1, 8),
    seed=st.integers(0, 1000),
    dead=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_ranks_hold_one_ranks_rows(
    kind: tuple[str, str], moe_case: CaseMaker, tokens: int, ranks: int, top_k: int, seed: int, dead: float
) -> None:
    """Live (token, slot) pairs of the ranks are one rank's, each once; partial results add up."""
    ids = torch.randint(0, 8, (tokens, top_k), generator=torch.Generator().manual_seed(seed))
    case = moe_case(kind, tokens=tokens, ids=ids, hidden=128, inter=64, seed=seed, dead=dead)
    core = hpc_moe._C
    rows = [build_map(case.topk_ids.cpu(), 8 // ranks, rank, core=core).row_to_slot for rank in range(ranks)]
    assert torch.cat(rows).equal(build_map(case.topk_ids.cpu(), 8, core=core).row_to_slot)
    check_sum(case, ranks, case.run())


def test_128_experts_on_8_ranks(moe_case: CaseMaker) -> None:
    case = moe_case("block-bf16", tokens=128, top_k=8, experts=128, hidden=128, inter=64)
    check_sum(case, 8, case.run())


def test_ids_of_other_ranks_and_their_weights_are_ignored(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    """NaN weights of remote ids, and remote ids changed at will: the same bits."""
    case = moe_case(kind).rank(2, 4)
    want = case.run()
    own = case.topk_ids // 2 == 2
    assert own.any() and not own.all()
    other = torch.where(own, case.topk_ids, (case.topk_ids + 5) % 4)
    weights = torch.where(own, case.topk_weights, float("nan"))
    assert case.but(topk_ids=other, topk_weights=weights).run().equal(want)


def test_shared_output_is_added_where_it_is_given(moe_case: CaseMaker) -> None:
    case = moe_case("block-bf16")
    shared = torch.ones_like(case.x)
    parts = [case.rank(0, 2).run(shared_output=shared), case.rank(1, 2).run()]
    assert torch.allclose(sum(part.float() for part in parts), case.run(shared_output=shared).float(), atol=0.05)
