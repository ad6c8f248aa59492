"""Edges of fused_moe: empty and skewed routings, tile boundaries, extreme scales and values, chunks, 64-bit offsets."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_common.grouped import TileRule
from hpc_common.reference import moe as reference

CaseMaker = Callable[..., Any]
E4M3 = torch.float8_e4m3fn


def test_no_tokens(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    case = moe_case(kind)
    none = case.tokens(slice(0, 0))
    result = none.run()
    assert result.shape == (0, 384) and result.dtype == torch.bfloat16 and result.device == case.x.device
    assert none.run(workspace=torch.empty(0, dtype=torch.uint8, device=case.x.device)).shape == (0, 384)
    case.check(case.run())


def test_no_live_slot(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    case = moe_case(kind, dead=1.0)
    assert (case.run() == 0).all()
    shared = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(case.x.device)
    assert case.run(shared_output=shared, routed_scaling_factor=3.0).equal(shared)


@pytest.mark.parametrize("top_k", [1, 2, 31, 32])
def test_top_k(kind: tuple[str, str], top_k: int, moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=9, top_k=top_k, experts=40, hidden=128, inter=128)
    case.check(case.run())


def test_both_id_dtypes_give_the_same_bits(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    case = moe_case(kind)
    assert case.but(topk_ids=case.topk_ids.long()).run().equal(case.run())


def test_duplicate_experts_in_a_row(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    ids = torch.tensor([[3, 3, 3, 1], [0, 0, 0, 0], [2, 1, 2, 1]]).repeat(7, 1)
    case = moe_case(kind, tokens=21, ids=ids, dead=0.2)
    case.check(case.run())


# Counts of one expert about every edge of the tile rule: 8-row steps, one to six tiles.
COUNTS = sorted({edge + step for edge in (1, 8, 16, 64, 120, 128, 256, 384, 512) for step in (-1, 0, 1)} - {0})


@pytest.mark.parametrize("count", COUNTS)
def test_rows_about_a_tile_edge(kind: tuple[str, str], count: int, moe_case: CaseMaker) -> None:
    """One expert with ``count`` rows, one with a single row, one with none."""
    ids = torch.tensor([2] * count + [0]).view(-1, 1)
    case = moe_case(kind, tokens=count + 1, top_k=1, experts=3, hidden=128, inter=128, ids=ids, dead=0.0)
    case.check(case.run())


@pytest.mark.parametrize("count", [8, 9, 129, 257])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_all_tokens_on_one_expert(
    kind: tuple[str, str], count: int, batch_invariant: bool, moe_case: CaseMaker
) -> None:
    ids = torch.full((count, 2), 15)
    case = moe_case(kind, tokens=count, experts=16, hidden=128, inter=192, ids=ids)
    case = case.but(batch_invariant=batch_invariant)
    case.check(case.run())


def test_512_experts(moe_case: CaseMaker) -> None:
    case = moe_case("block-bf16", tokens=70, top_k=8, experts=512, hidden=128, inter=64)
    case.check(case.run())


@pytest.mark.kinds("block-bf16", "block-e4m3")
@pytest.mark.parametrize("tokens", [24, 150])
def test_zero_groups(kind: tuple[str, str], tokens: int, moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=tokens)
    x = case.x.float()
    x[0, 128:256] = 0
    x[1] = 0
    case = case.but(x=x.to(case.x.dtype))
    if case.quant.x_scale is not None:
        case.quant.x_scale[0, 1] = 0
        case.quant.x_scale[1] = 0
    result = case.run()
    assert result.isfinite().all() and (result[1] == 0).all()
    case.check(result)


@pytest.mark.kinds("block-bf16", "block-e4m3", "tensor-bf16")
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38])
def test_zero_and_subnormal_scales(kind: tuple[str, str], value: float, moe_case: CaseMaker) -> None:
    case = moe_case(kind)
    for name, scale in vars(case.quant).items():
        if scale is None:
            continue
        result = case.scales(**{name: torch.full_like(scale, value)}).run()
        assert result.isfinite().all()
        if value == 0:
            assert (result == 0).all()
        else:  # what is left is at most the saturated value times the scale
            assert float(result.float().abs().max()) < 1e-25


@pytest.mark.parametrize("tokens", [24, 150])
@pytest.mark.parametrize("scale", [1 / 500, 1e-6])
@pytest.mark.kinds("tensor-bf16")
def test_static_scale_saturates(kind: tuple[str, str], tokens: int, scale: float, moe_case: CaseMaker) -> None:
    """x / x_scale of 500 and of 1e6, and the activation likewise: 448, never the NaN code 0x7F."""
    case = moe_case(kind, tokens=tokens)
    ones = torch.ones_like(case.x) * torch.where(torch.arange(case.x.shape[1], device=case.x.device) % 2 == 0, 1, -1)
    case = case.but(x=ones).scales(x_scale=torch.tensor([scale], device=case.x.device))
    result = case.run()
    assert result.isfinite().all()
    case.check(result)
    case = case.scales(act_scale=torch.tensor([1e-9], device=case.x.device))
    result = case.run()
    assert result.isfinite().all()
    case.check(result)


def test_quantisers_round_as_stated() -> None:
    values = torch.tensor([[500.0, 1e6, -1e6, 448.0, 464.0, 0.0, 2.0**-10, -(2.0**-9)]])
    one = torch.ones(1)
    codes = hpc_moe.quantize_static(values, one).view(torch.uint8)[0].tolist()
    assert codes == [0x7E, 0x7E, 0xFE, 0x7E, 0x7E, 0x00, 0x00, 0x81]  # 2^-10 is a tie, to even
    q, scale = hpc_moe.quantize_groups(torch.tensor([[0.0] * 4 + [1e-20, -2e-20, 3e-20, 0.0] + [1e30] * 4]), 4)
    assert scale[0].tolist() == [0.0, float(torch.tensor(3e-20) / 448), float(torch.tensor(1e30) / 448)]
    assert q.float()[0].tolist() == [0] * 4 + [144, -288, 448, 0] + [448] * 4
    nothing, scale = hpc_moe.quantize_groups(torch.full((1, 8), 2.0**-118), 8)
    assert (nothing.float() == 0).all() and (scale == 0).all()
    least, scale = hpc_moe.quantize_groups(torch.full((1, 8), 2.0**-117), 8)
    assert (least.float() == 448).all() and scale[0, 0] > 2.0**-126


@pytest.mark.parametrize("group", [64, 128])
def test_the_quantisers_and_the_reference_agree_bit_for_bit(group: int) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-130, 100, (400, 4), generator=generator).repeat_interleave(128, 1).double()
    values = (torch.randn(400, 512, generator=generator).double() * 2.0**exponents).bfloat16()
    values[:7, :128] = 0
    have, want = hpc_moe.quantize_groups(values, group), reference.quantise_blocks(values, group)
    assert have[0].view(torch.uint8).equal(want[0].view(torch.uint8)) and have[1].equal(want[1])
    for scale in (0.0, 1e-40, 2.0**-126, 1e-20, 0.37, 1e20):
        scale = torch.tensor([scale])
        have, want = hpc_moe.quantize_static(values, scale), reference.quantise_tensor(values, scale)
        assert have.view(torch.uint8).equal(want.view(torch.uint8))


def test_every_e4m3_code_as_a_weight(moe_case: CaseMaker) -> None:
    """Also the slow codes: a NaN weight gives NaN to the tokens of its expert and to no other."""
    case = moe_case("block-e4m3", dead=0.0)
    codes = torch.arange(256).repeat(case.w13.numel() // 256).view(case.w13.shape)
    codes = torch.where((codes & 127) == 127, 0, codes).to(torch.uint8).to(case.w13.device)
    good = case.but(w13=codes.view(E4M3))
    good.check(good.run())
    codes[3, 5, 7] = 0x7F
    bad = good.but(w13=codes.view(E4M3))
    hit = (case.topk_ids == 3).any(1)
    assert bad.run()[hit].isnan().any(1).all() and bad.run()[~hit].equal(good.run()[~hit])


@pytest.mark.parametrize("extreme", [1e30, -1e30])
def test_extreme_gates_give_no_nan(extreme: float, moe_case: CaseMaker) -> None:
    case = moe_case("bf16")
    w13 = case.w13.clone()
    w13[:, :256] = extreme * 1e-3
    assert not case.but(w13=w13, x=case.x.abs()).run(swiglu_limit=7.0).isnan().any()


@pytest.mark.parametrize("name", ["block-e4m3", "tensor-bf16"])
@pytest.mark.parametrize("tokens", [32768, 32769, 40000])
def test_chunks(name: str, tokens: int, moe_case: CaseMaker) -> None:
    """Above 32,768 tokens a call runs in chunks; a chunk's rows equal those of a call of its own."""
    case = moe_case(name, tokens=tokens, top_k=1, experts=2, hidden=128, inter=64)
    config = hpc_moe._C.make_config(
        num_tokens=tokens, top_k=1, num_local_experts=2, num_experts=2, hidden=128, intermediate=64, quant="tensor"
    )
    assert config.num_chunks == (1 if tokens <= 32768 else 2) and config.chunk_tokens <= 32768
    shared = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    result = case.run(shared_output=shared)
    for some in (
        slice(tokens - 300, tokens),
        slice(config.chunk_tokens - 40, min(config.chunk_tokens + 40, tokens)),
        slice(0, 40),
    ):
        part = case.tokens(some).but(shared_output=shared[some])
        part.check(result[some])
        assert result[some].equal(part.run())


def test_262144_tokens_need_no_more_workspace_than_32768() -> None:
    sizes = dict(top_k=8, num_local_experts=64, hidden=4096, intermediate=256)
    assert hpc_moe.workspace_bytes(262144, **sizes) == hpc_moe.workspace_bytes(32768, **sizes)


def test_offsets_beyond_2_to_31(moe_case: CaseMaker) -> None:
    """The last of 130 experts of 16.8 MB each: the same bits as the same expert at index 0."""
    generator = torch.Generator().manual_seed(5)
    experts, hidden, inter = 130, 4096, 2048
    w13 = torch.empty(experts, 2 * inter, hidden, dtype=E4M3)  # only two experts' pages are ever touched
    w2 = torch.empty(experts, hidden, inter, dtype=E4M3)
    assert w13.numel() > 2**31
    s13, s2 = torch.full((experts, 32, 32), float("nan")), torch.full((experts, 32, 16), float("nan"))
    for expert in (0, 129):
        w13[expert] = reference.to_e4m3(torch.randn(2 * inter, hidden, generator=generator.manual_seed(1)) * 64)
        w2[expert] = reference.to_e4m3(torch.randn(hidden, inter, generator=generator.manual_seed(2)) * 64)
        s13[expert] = 1 / 64 / 64
        s2[expert] = 1 / 64 / 45
    x = torch.randn(4, hidden, generator=generator).bfloat16()
    ids, weights = torch.full((4, 1), 129), torch.ones(4, 1)
    quant = hpc_moe.Fp8Block(s13, s2)
    last = hpc_moe.fused_moe(x, w13, w2, ids, weights, quant)
    first = hpc_moe.fused_moe(x, w13, w2, torch.zeros_like(ids), weights, quant)
    assert last.equal(first) and last.isfinite().all() and float(last.float().abs().max()) > 0.1


def test_config_rules() -> None:
    """The rules the implementations are built on: 8-row tiles in the low regime, else the wider the more rows."""
    sizes = dict(num_local_experts=24, num_experts=192, hidden=4096, intermediate=1536, quant="block")
    make = hpc_moe._C.make_config
    low, mid = make(num_tokens=56, top_k=8, **sizes), make(num_tokens=57, top_k=8, **sizes)
    assert (low.regime, mid.regime) == ("low", "mid")
    assert TileRule(*low.rule) == TileRule(8, 8, False) and TileRule(*mid.rule) == TileRule(32, 8, False)
    widest = [make(num_tokens=tokens, top_k=8, **sizes).rule[0] for tokens in (528, 529, 1152, 1153, 8192)]
    assert widest == [32, 64, 64, 128, 128]
    assert make(num_tokens=129, top_k=8, **{**sizes, "quant": "none"}).rule[0] == 128
    # Per tensor, 192 columns of I, from 128 rows an expert on: where tiles of 96, an even number, are two thirds full.
    triples = {**sizes, "intermediate": 192, "quant": "tensor"}
    rules = [tuple(make(num_tokens=each, top_k=8, **triples).rule) for each in (3071, 3072, 4608, 4609, 6143, 6144)]
    assert [rule == (96, 8, True) for rule in rules] == [False, True, True, False, False, True]
    narrow = {**sizes, "intermediate": 192}
    exact = [make(num_tokens=tokens, top_k=8, **narrow).exact for tokens in (120, 121, 170, 171)]
    assert exact == [False, True, True, False]
    assert [make(num_tokens=tokens, top_k=8, **sizes).exact for tokens in (57, 128, 129)] == [True, True, False]
    # Per tensor the mid regime is faster a little earlier.
    tensor = {**narrow, "quant": "tensor"}
    assert [make(num_tokens=tokens, top_k=8, **tensor).regime for tokens in (96, 97)] == ["low", "mid"]
    # Experts may have all tokens: of more than 128 the low regime's tiles are too many; but a small layer's are not.
    assert [make(num_tokens=tokens, top_k=1, **sizes).regime for tokens in (128, 129)] == ["low", "mid"]
    small = dict(num_local_experts=6, num_experts=6, hidden=640, intermediate=256, quant="block")
    assert [make(num_tokens=tokens, top_k=2, **small).regime for tokens in (256, 257)] == ["low", "mid"]
    exact = [make(num_tokens=tokens, top_k=2, **small).exact for tokens in (256, 257, 2048, 2049)]
    assert exact == [False, True, True, False]
    few = [make(num_tokens=tokens, top_k=8, **{**sizes, "intermediate": 192}) for tokens in (1, 4, 5)]
    assert [each.few for each in few] == [True, True, False] and few[0].up_columns == 16
    assert [each.x_in_workspace for each in few] == [each.h_quantised for each in few] == [False, False, True]
    assert low.h_is_bf16 and low.index_ctas == 0
    assert mid.x_in_workspace and not mid.h_is_bf16 and mid.index_ctas > 0
    few = make(num_tokens=8, top_k=8, batch_invariant=True, **sizes)
    assert few.regime == "mid" and not few.guess and not low.guess and mid.guess
    # Large from 128 rows an expert on by block, above them per tensor.
    edges = [make(num_tokens=tokens, top_k=8, **sizes).regime for tokens in (3071, 3072)]
    assert edges == ["mid", "large"]
    edges = [make(num_tokens=tokens, top_k=8, **{**sizes, "quant": "tensor"}).regime for tokens in (3072, 3073)]
    assert edges == ["mid", "large"]
    large = make(num_tokens=8192, top_k=8, num_sms=132, **sizes)
    assert large.regime == "large" and 0 < large.up_grid <= 132 and 0 < large.down_grid <= 132
    # Panels of at most 34 MB of y, as expected, while an expert has one tile; on one of four ranks a quarter is.
    narrow = {**narrow, "num_local_experts": 192, "num_experts": 192, "hidden": 4096, "num_sms": 132}
    edges = (544, 545, 1088, 1089, 3071, 3072)
    columns = [make(num_tokens=tokens, top_k=8, **narrow).panel_columns for tokens in edges]
    assert columns == [4096, 2048, 2048, 1536, 512, 4096]
    assert make(num_tokens=1089, top_k=8, **{**narrow, "num_local_experts": 48}).panel_columns == 4096
    assert make(num_tokens=1089, top_k=8, **{**narrow, "num_sms": 0}).panel_columns == 4096
    assert make(num_tokens=1089, top_k=8, **{**narrow, "quant": "none"}).panel_columns == 4096
    assert make(num_tokens=4096, top_k=8, batch_invariant=True, **narrow).panel_columns == 4096
    assert make(num_tokens=0, top_k=8, **sizes).layout.bytes == 0
    assert make(num_tokens=9, top_k=8, **{**sizes, "intermediate": 192}).act_group == 64


def test_a_scale_of_another_token_is_not_read(moe_case: CaseMaker) -> None:
    """x scales of tokens without a live slot may be NaN."""
    case = moe_case("block-e4m3", dead=0.0)
    want = case.run()
    ids = case.topk_ids.clone()
    ids[5] = -1
    scale = case.quant.x_scale.clone()
    scale[5] = float("nan")
    result = case.but(topk_ids=ids, quant=replace(case.quant, x_scale=scale)).run()
    keep = torch.arange(24) != 5
    assert result[keep].equal(want[keep]) and (result[5] == 0).all()
