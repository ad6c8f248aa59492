"""The kinds of fault that users of fused MoE operators reported, each as a small input (numbers as in the fault list).

M11 (64-bit offsets) is in test_moe_edges.py. M18 and M20 are questions of speed: benchmarks/.
"""

import time
from collections.abc import Callable
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_common.grouped import TileRule, build_map, check_map
from hpc_common.reference import moe as reference
from hypothesis import example, given
from hypothesis import strategies as st

CaseMaker = Callable[..., Any]


@given(average=st.integers(1, 300), jitter=st.integers(-1, 1))
@example(average=128, jitter=0)
def test_m1_one_tile_size_from_one_function(average: int, jitter: int) -> None:
    """Average rows about 128 an expert: the tiles cover every row, and the Config's bound holds, at every average."""
    experts, top_k = 128, 8
    tokens = max(average * experts // top_k + jitter, 1)
    config = hpc_moe._C.make_config(
        num_tokens=tokens, top_k=top_k, num_local_experts=experts, num_experts=experts, hidden=512, intermediate=512,
        quant="block", num_sms=132,
    )  # fmt: skip
    ids = (torch.arange(tokens * top_k) % experts).view(tokens, top_k)
    rule = TileRule(*config.rule)
    tile_map = build_map(ids, experts, rule=rule, core=hpc_moe._C)
    check_map(ids, tile_map, rule=rule)
    assert tile_map.tasks.shape[0] <= config.max_tiles


@pytest.mark.parametrize("tokens", [1023, 1024, 1025, 2047, 2048, 2049, 4096])
def test_m1_average_of_128_rows_an_expert(tokens: int, moe_case: CaseMaker) -> None:
    """E=128, k=8: 2,048 tokens hung. Sizes that a CPU does at once; the same counts and tiles."""
    case = moe_case("tensor-e4m3", tokens=tokens, top_k=8, experts=128, hidden=128, inter=64, dead=0.0)
    begin = time.perf_counter()
    result = case.run()
    assert time.perf_counter() - begin < 60
    some = slice(tokens - 40, tokens)
    case.tokens(some).check(result[some])


def test_m2_local_and_global_expert_counts(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    """128 experts on 8 ranks, rank 3: its rows are those of the single rank."""
    case = moe_case(kind, tokens=128, top_k=4, experts=128, hidden=128, inter=64)
    part = case.rank(3, 8)
    part.check(part.run())
    whole = build_map(case.topk_ids.cpu(), 128, core=hpc_moe._C)
    mine = build_map(case.topk_ids.cpu(), 16, 3, core=hpc_moe._C)
    assert mine.row_to_slot.equal(whole.row_to_slot[whole.offsets[48] : whole.offsets[64]])


def test_m3_ids_are_global_on_every_rank(
    kind: tuple[str, str], moe_case: CaseMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([[2, 3], [0, 5], [2, 7]])
    case = moe_case(kind, tokens=3, experts=8, ids=ids, dead=0.0)
    total = torch.zeros(case.x.shape, dtype=torch.float64)
    for rank in range(4):
        part = case.rank(rank, 4)
        result = part.run()
        part.check(result)
        hit = (ids // 2 == rank).any(1)
        assert (result[~hit] == 0).all() and result[hit].abs().sum(1).gt(0).all()
        total += result.double().cpu()
    case.check(total)
    monkeypatch.setenv("HPC_DEBUG", "1")  # a GPU looks at the ids only then
    with pytest.raises(ValueError, match=r"topk_ids: expected ids in \[-1, 8\), got 8 at token 0, slot 0"):
        case.but(topk_ids=torch.full_like(case.topk_ids, 8), ep_rank=0).run()


def test_m4_sentinel_ids(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    ids = torch.tensor([[0, -1], [-1, -1], [3, 2]])
    case = moe_case(kind, tokens=3, experts=4, ids=ids, dead=0.0)
    weights = torch.where(case.topk_ids < 0, float("nan"), case.topk_weights)
    case = case.but(topk_weights=weights)
    result = case.run()
    assert (result[1] == 0).all()
    case.check(result)
    only = case.but(topk_ids=case.topk_ids[:, :1].contiguous(), topk_weights=weights[:, :1].contiguous()).run()
    assert result[0].equal(only[0])


def test_m5_no_tokens_then_a_normal_call(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=9, top_k=8, hidden=512, inter=128)
    want = case.run()
    assert case.tokens(slice(0, 0)).run().shape == (0, 512)
    assert case.run().equal(want)


def test_m6_empty_experts(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    """All tokens on expert 3 of 4, after memory of the same sizes was full of NaN."""
    case = moe_case(kind, tokens=24, experts=4, ids=torch.full((24, 2), 3), dead=0.0)
    poisoned = torch.full_like(case.x, float("nan"), dtype=torch.bfloat16)
    del poisoned
    workspace = torch.full((1 << 21,), 0xFF, dtype=torch.uint8, device=case.x.device)
    result = case.run(workspace=workspace)
    assert result.isfinite().all()
    case.check(result)


@pytest.mark.parametrize("crowd", [33, 129])
def test_m7_padded_rows(kind: tuple[str, str], crowd: int, moe_case: CaseMaker) -> None:
    """Expert 0 has 33 rows, expert 1 one: what a tile holds past its rows never reaches a row."""
    ids = torch.tensor([0] * crowd + [1]).view(-1, 1)
    case = moe_case(kind, tokens=crowd + 1, experts=2, ids=ids, dead=0.0)
    nbytes = hpc_moe.workspace_bytes(crowd + 1, 1, 2, 384, 256, hpc_moe.quant.quant_name(case.quant))
    zeros = torch.zeros(nbytes, dtype=torch.uint8, device=case.x.device)
    want = case.run(workspace=zeros)
    case.check(want)
    assert case.run(workspace=torch.full_like(zeros, 0xFF)).equal(want)


def test_m7_a_nan_token_stays_in_its_row(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    case = moe_case(kind, dead=0.0)
    want = case.run()
    x = case.x.clone()
    x.view(torch.uint8)[4] = 0x7F if x.dtype == torch.float8_e4m3fn else 0xFF
    result = case.but(x=x).run()
    rest = torch.arange(24) != 4
    assert result[rest].equal(want[rest])
    if kind[1] == "cpu":  # on a GPU the row itself is not specified
        assert result[4].isnan().all()


@pytest.mark.kinds("block-bf16")
@pytest.mark.parametrize("tokens", [24, 200])
def test_m10_a_zero_group_is_zero(kind: tuple[str, str], tokens: int, moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=tokens, dead=0.0)
    x = case.x.clone()
    x[0, 128:256] = 0
    result = case.but(x=x).run()
    assert result.isfinite().all()
    case.but(x=x).check(result)


@pytest.mark.kinds("tensor-bf16")
@pytest.mark.parametrize("quotient", [500.0, 1e6])
def test_m10_past_the_largest_value(kind: tuple[str, str], quotient: float, moe_case: CaseMaker) -> None:
    """q = 500 and 1e6 become 448 (code 0x7E), as if 448 had come."""
    case = moe_case(kind, dead=0.0).scales(x_scale=torch.ones(1, device=kind[1]))
    over = case.but(x=torch.full_like(case.x, quotient)).run()
    assert over.isfinite().all() and over.equal(case.but(x=torch.full_like(case.x, 448.0)).run())
    assert reference.to_e4m3(torch.tensor([quotient])).view(torch.uint8).item() == 0x7E


@pytest.mark.parametrize("activation", ["gelu", "relu2", "swiglu", "SiLU", "", None])
def test_m17_other_activations_are_refused_before_anything_runs(activation: Any, moe_case: CaseMaker) -> None:
    case = moe_case("bf16")
    out = torch.full_like(case.x, 7.0)
    with pytest.raises(ValueError, match='hpc_moe.fused_moe: activation: expected "silu", got'):
        case.run(activation=activation, out=out)
    assert (out == 7).all()


@pytest.mark.gpu
def test_m14_data_written_late_on_the_stream(moe_case: CaseMaker) -> None:
    """x, ids and scales written behind a long kernel on the same stream, the call right behind it."""
    running = [kind for kind in ("block-e4m3", "tensor-e4m3", "bf16") if _runs(kind)]
    if not running:
        pytest.skip("no GPU kernel in the support table")
    for kind in running:
        case = moe_case((kind, "cuda"))
        want = case.run()
        x, ids = case.x.clone(), case.topk_ids.clone()
        for _ in range(50):
            x.view(torch.uint8).zero_()
            ids.fill_(-1)
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000)  # about 100 us
            x.view(torch.uint8).copy_(case.x.view(torch.uint8))
            ids.copy_(case.topk_ids)
            assert case.but(x=x, topk_ids=ids).run().equal(want)


@pytest.mark.gpu
def test_m3_a_gpu_skips_ids_out_of_range_unless_debugging(moe_case: CaseMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in filter(_runs, ("block-e4m3", "tensor-e4m3", "bf16")):
        case = moe_case((kind, "cuda"))
        for wild in (-2, 8, -(2**31), 2**31 - 1):
            bad = case.but(topk_ids=torch.where(case.topk_ids < 0, wild, case.topk_ids))
            monkeypatch.delenv("HPC_DEBUG", raising=False)
            assert bad.run().equal(case.run())
            monkeypatch.setenv("HPC_DEBUG", "1")
            with pytest.raises(ValueError, match=f"topk_ids: expected ids in .* got {wild}"):
                bad.run()


def _runs(kind: str) -> bool:
    quant = {"block-e4m3": "block", "tensor-e4m3": "tensor", "bf16": "none"}[kind]
    return hpc_moe.is_supported(quant, torch.bfloat16 if quant == "none" else torch.float8_e4m3fn, "cuda")
