"""What holds of fused_moe for any input: determinism, batch invariance, permutations, workspaces, Config sizes."""

from collections.abc import Callable
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_common import grouped
from hpc_common.poison import Canary
from hypothesis import example, given, settings
from hypothesis import strategies as st

CaseMaker = Callable[..., Any]
FEW = settings(max_examples=max(settings.default.max_examples // 3, 2))


@pytest.mark.parametrize("tokens", [20, 200])
def test_repeated_calls_are_bit_identical(kind: tuple[str, str], tokens: int, moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=tokens)
    first = case.run()
    assert all(case.run().equal(first) for _ in range(20))


@FEW
@given(tokens=st.integers(1, 150), seed=st.integers(0, 1000), data=st.data())
def test_batch_invariance(kind: tuple[str, str], moe_case: CaseMaker, tokens: int, seed: int, data: Any) -> None:
    """A token's row has the same bits alone, in any subset and in any order."""
    case = moe_case(kind, tokens=tokens, hidden=256, inter=192, seed=seed)
    whole = case.run(batch_invariant=True)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)).to(case.x.device)
    some = order[: data.draw(st.integers(1, tokens))]
    assert case.tokens(some).run(batch_invariant=True).equal(whole[some])
    one = data.draw(st.integers(0, tokens - 1))
    assert case.tokens(slice(one, one + 1)).run(batch_invariant=True).equal(whole[one : one + 1])


def test_batch_invariance_of_every_token_alone(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    """Enough values that sums of another order would show: in bf16 one in thousands of them does."""
    case = moe_case(kind, tokens=64, top_k=2, experts=4, hidden=512, inter=512, dead=0.0)
    whole = case.run(batch_invariant=True)
    for token in range(64):
        one = slice(token, token + 1)
        assert case.tokens(one).run(batch_invariant=True).equal(whole[one])


@pytest.mark.parametrize("others", [1, 63, 511])
def test_batch_invariance_against_a_crowd(kind: tuple[str, str], others: int, moe_case: CaseMaker) -> None:
    """All other tokens crowd onto the first token's experts."""
    ids = torch.tensor([[1, 6, 3, 0]]).repeat(others + 1, 1)
    case = moe_case(kind, tokens=others + 1, hidden=128, inter=128, ids=ids, dead=0.0)
    alone = case.tokens(slice(0, 1)).run(batch_invariant=True)
    assert case.run(batch_invariant=True)[:1].equal(alone)


@FEW
@given(tokens=st.integers(2, 150), seed=st.integers(0, 1000))
def test_permuting_tokens_permutes_rows(kind: tuple[str, str], moe_case: CaseMaker, tokens: int, seed: int) -> None:
    case = moe_case(kind, tokens=tokens, hidden=128, inter=128, seed=seed)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)).to(case.x.device)
    want = case.run()
    result = case.tokens(order).run()
    # Counts and tiles are as they were, so nothing but the order of an expert's rows can differ.
    case.tokens(order).check(result)
    assert (result.float() - want[order].float()).abs().max() <= 2**-7 * want.float().abs().max()


@FEW
@given(seed=st.integers(0, 1000))
def test_permuting_experts_changes_nothing(kind: tuple[str, str], moe_case: CaseMaker, seed: int) -> None:
    case = moe_case(kind, hidden=256, inter=192, seed=seed)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).to(case.x.device)
    inverse = order.argsort()
    ids = torch.where(case.topk_ids < 0, -1, inverse[case.topk_ids.long()])
    quant = case.quant
    moved = case.but(
        w13=case.w13.view(torch.uint8)[order].view(case.w13.dtype),
        w2=case.w2.view(torch.uint8)[order].view(case.w2.dtype),
        topk_ids=ids,
    )
    if quant is not None:
        moved = moved.scales(w13_scale=quant.w13_scale[order], w2_scale=quant.w2_scale[order])
    assert moved.run().equal(case.run())


@pytest.mark.parametrize("tokens", [1, 20, 200])
@pytest.mark.parametrize("value", [0x00, 0xFF, 0x7F, "random"])
def test_a_dirty_workspace_gives_the_result_of_a_fresh_one(
    kind: tuple[str, str], tokens: int, value: int | str, moe_case: CaseMaker, dirty: Callable[..., torch.Tensor]
) -> None:
    """0xFF is NaN in bf16, fp32 and e4m3 and -1 as an index: padded rows and stale counts would show."""
    case = moe_case(kind, tokens=tokens, top_k=2, inter=192)
    want = case.run()
    quant = hpc_moe.quant.quant_name(case.quant)
    workspace = hpc_moe.MoeWorkspace(tokens, 2, 8, 384, 192, quant, device=case.x.device)
    if value == "random":
        dirty(workspace.buffer)
    else:
        workspace.buffer.fill_(value)
    assert case.run(workspace=workspace).equal(want)
    assert case.run(workspace=workspace).equal(want)  # and what a call leaves behind is dirt like any other


@pytest.mark.parametrize("tokens", [1, 20, 200])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_nothing_is_written_outside_workspace_and_out(
    kind: tuple[str, str], tokens: int, batch_invariant: bool, moe_case: CaseMaker
) -> None:
    case = moe_case(kind, tokens=tokens, inter=192)
    quant, dtype, device = hpc_moe.quant.quant_name(case.quant), case.x.dtype, case.x.device
    nbytes = hpc_moe.workspace_bytes(tokens, 4, 8, 384, 192, quant, None, dtype, batch_invariant)
    with Canary((nbytes,), torch.uint8, device) as workspace, Canary(case.x.shape, torch.bfloat16, device) as out:
        case.run(workspace=workspace, out=out, batch_invariant=batch_invariant)
        assert out.equal(case.run(batch_invariant=batch_invariant))


def test_one_workspace_serves_layers_of_different_kinds(moe_case: CaseMaker) -> None:
    workspace = torch.empty(1 << 23, dtype=torch.uint8)
    for kind in ("block-bf16", "tensor-e4m3", "bf16", "block-e4m3"):
        for tokens in (150, 3):
            case = moe_case(kind, tokens=tokens)
            assert case.run(workspace=workspace).equal(case.run())


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a call, as make_config takes them."""
    local = draw(st.integers(1, 512))
    return {
        "num_tokens": draw(st.one_of(st.integers(0, 300), st.integers(0, 262144))),
        "top_k": draw(st.integers(1, 32)),
        "num_local_experts": local,
        "num_experts": local * draw(st.sampled_from([1, 2, 8, 64])),
        "hidden": 128 * draw(st.integers(1, 64)),
        "intermediate": 64 * draw(st.integers(1, 64)),
        "quant": draw(st.sampled_from(["none", "block", "tensor"])),
        "x_is_bf16": draw(st.booleans()),
        "batch_invariant": draw(st.booleans()),
    }


LAYER = {
    "num_tokens": 0, "top_k": 8, "num_local_experts": 64, "num_experts": 64, "hidden": 1024, "intermediate": 2048,
    "quant": "block", "x_is_bf16": True, "batch_invariant": False,
}  # fmt: skip
WIDE = {**LAYER, "num_local_experts": 192, "num_experts": 192, "hidden": 4096, "intermediate": 192}


@given(problems(), st.integers(0, 262144))
@example({**LAYER, "num_tokens": 18}, 16)  # just past the low regime, which needs more
@example({**LAYER, "num_tokens": 32769}, 32768)  # two chunks need less than the largest single one
@example({**WIDE, "num_tokens": 545}, 544)  # two panels need less than the largest single one
@example({**WIDE, "num_tokens": 1100}, 1088)  # three less than two
@example({**WIDE, "num_tokens": 1100, "num_local_experts": 48}, 544)  # a rank's share is a quarter, its workspace whole
def test_the_workspace_query_covers_every_smaller_call(problem: dict[str, Any], tokens: int) -> None:
    largest = hpc_moe._C.max_workspace_bytes(**problem)
    low = [min(1024, rows * problem["num_experts"]) // problem["top_k"] + more for rows in (2, 4, 5) for more in (0, 1)]
    for smaller in (tokens, problem["num_tokens"], *low, 32768, 32769, 1):
        smaller = min(smaller, problem["num_tokens"])
        for num_sms in (0, 132):
            call = {**problem, "num_tokens": smaller, "num_sms": num_sms}
            assert hpc_moe._C.make_config(**call).layout.bytes <= largest


@given(problems(), st.integers(0, 264))
@example({**LAYER, "num_tokens": 32769}, 132)
@example({**LAYER, "num_tokens": 65537}, 132)
def test_config_sizes_hold_together(problem: dict[str, Any], num_sms: int) -> None:
    config = hpc_moe._C.make_config(**problem, num_sms=num_sms)
    tokens, experts = problem["num_tokens"], problem["num_local_experts"]
    assert config.chunk_tokens <= 32768 and config.num_chunks * config.chunk_tokens >= tokens
    assert tokens == 0 or (config.num_chunks - 1) * config.chunk_tokens < tokens  # no chunk is empty
    assert config.chunk_rows == config.chunk_tokens * problem["top_k"]
    assert config.max_tiles == grouped.max_tiles(config.chunk_rows, experts, grouped.TileRule(*config.rule))
    assert config.up_grid <= num_sms and config.down_grid <= num_sms
    if tokens == 0:
        assert config.layout.bytes == 0
        return
    rows, hidden, inter = config.chunk_rows, problem["hidden"], problem["intermediate"]
    assert config.panel_columns == hidden or (0 < config.panel_columns < hidden and config.panel_columns % 256 == 0)
    block, own_x = problem["quant"] == "block", config.x_in_workspace
    needs = {
        "counters": 256,
        "offsets": 4 * (experts + 1),
        "tile_offsets": 4 * (experts + 1),
        "slot_to_row": 4 * rows,
        "row_to_slot": 4 * rows,
        "tasks": 16 * config.max_tiles,
        "x_q": config.chunk_tokens * hidden if own_x else 0,
        "x_scale": config.chunk_tokens * hidden // 32 if own_x and block else 0,
        "h": rows * inter * (2 if config.h_is_bf16 else 1),
        "h_scale": 4 * rows * inter // config.act_group if block and not config.h_is_bf16 else 0,
        "y": 2 * rows * config.panel_columns,
    }
    spans = sorted((getattr(config.layout, name), need) for name, need in needs.items() if need)
    assert all(begin % 256 == 0 for begin, _ in spans)
    ends = [begin + need for begin, need in spans]
    starts = [begin for begin, _ in spans[1:]] + [config.layout.bytes]
    assert all(end <= start for end, start in zip(ends, starts, strict=True))  # disjoint, and inside


@given(problems(), st.sampled_from([2, 4, 8]), st.sampled_from([0, 132]))
def test_every_rank_takes_the_regime_of_a_single_rank(problem: dict[str, Any], ranks: int, num_sms: int) -> None:
    """So that a row's bits cannot depend on the split."""
    problem["num_sms"] = num_sms
    problem["num_local_experts"] = min(problem["num_local_experts"], 64)
    problem["num_experts"] = problem["num_local_experts"] * ranks
    one = {**problem, "num_local_experts": problem["num_experts"]}
    part, whole = hpc_moe._C.make_config(**problem), hpc_moe._C.make_config(**one)
    fields = ("regime", "rule", "act_group", "h_is_bf16", "x_in_workspace", "chunk_tokens", "exact")
    assert [getattr(part, name) for name in fields] == [getattr(whole, name) for name in fields]


@given(problems())
def test_batch_invariant_calls_take_one_regime(problem: dict[str, Any]) -> None:
    config = hpc_moe._C.make_config(**{**problem, "batch_invariant": True})
    assert config.regime == "mid"  # a row's bits do not depend on the tile's width, but on the regime
    assert config.exact == (problem["quant"] != "none")  # and on how sums are promoted
    assert grouped.TileRule(*config.rule) in {grouped.TileRule(width, 8, False) for width in (32, 64, 128)}
