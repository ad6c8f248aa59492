"""Kernels of fused_moe on a Hopper GPU with experts that are all equal: which one has a token cannot matter.

So any share of the tokens is held to one result, bit for bit or by float64 of a dense layer: every count of rows around
the edges of tiles, every average, every kind of kernel, calls of several chunks; and each of these a thousand times.
"""

from collections.abc import Callable
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_common.poison import bits, fill_nan_
from hpc_common.reference import moe as reference
from moe_kernel_checks import LOOSE, LOOSE_WORST, config_of, halves

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_hang")]
CaseMaker = Callable[..., Any]

# Calls with a slot a token that reach every kind of kernel: tokens, experts, hidden, inter -> regime, widest tile.
LAYERS = {
    "few pairs": ((20, 8, 256, 256), "low", 8),
    "low": ((100, 16, 512, 192), "low", 8),
    "fp32 sums, 32 rows": ((1100, 64, 128, 256), "mid", 32),
    "fp32 sums, 128 rows": ((1600, 16, 256, 192), "mid", 128),
    "32 rows, short": ((1500, 128, 256, 192), "mid", 32),
    "32 rows": ((1100, 80, 256, 256), "mid", 32),
    "64 rows, short": ((4000, 128, 256, 192), "mid", 64),
    "64 rows": ((3000, 80, 256, 256), "mid", 64),
    "64 rows, odd": ((1900, 40, 256, 448), "mid", 64),
    "128 rows": ((6000, 80, 256, 256), "mid", 128),
    "128 rows, odd": ((6000, 80, 256, 320), "mid", 128),
    "large": ((4500, 8, 512, 256), "large", 128),
    "large, 192 columns": ((5600, 8, 512, 192), "large", 128),  # per tensor tasks of three units and 96 rows
    "large, 175 rows": ((1400, 8, 256, 1024), "large", 128),  # by block three blocks of 64 rows for two CTAs
    "large, 167 rows, 192 columns": ((16_000, 96, 256, 192), "large", 128),
}


def with_equal_experts(case: Any) -> Any:
    """``case`` (FP8) with the first expert's weights and scales for all."""

    def first(tensor: torch.Tensor) -> torch.Tensor:
        return bits(tensor)[:1].repeat(tensor.shape[0], *[1] * (tensor.dim() - 1)).view(tensor.dtype)

    case = case.but(w13=first(case.w13), w2=first(case.w2))
    return case.scales(w13_scale=first(case.quant.w13_scale), w2_scale=first(case.quant.w2_scale))


def equal_experts(name: str, layer: str, moe_case: CaseMaker) -> Any:
    """A case of ``layer``."""
    (tokens, experts, hidden, inter), regime, widest = LAYERS[layer]
    ids = torch.randint(0, experts, (tokens, 1), generator=torch.Generator().manual_seed(tokens))
    case = with_equal_experts(moe_case(name, tokens, 1, experts, hidden, inter, ids=ids, dead=0.0, device="cuda"))
    config = config_of(case)
    three = name.startswith("tensor") and regime == "large" and inter == 192
    assert (config.regime, config.rule[0]) == (regime, 96 if three else widest)
    assert config.exact == layer.startswith("fp32") and config.few == (layer == "few pairs")
    return case


@pytest.mark.parametrize("name", ["block-e4m3", "tensor-e4m3"])
@pytest.mark.parametrize("layer", LAYERS)
def test_any_share_of_equal_experts(layer: str, name: str, moe_case: CaseMaker) -> None:
    """An expert with each count of rows around the edges of its tiles; the others evenly among the rest, or on one.

    The experts are equal, so nothing may change: not a bit, whatever tiles, tasks and neighbours a row gets.
    """
    case = equal_experts(name, layer, moe_case)
    config = config_of(case)
    space = torch.full((config.layout.bytes,), 255, dtype=torch.uint8, device="cuda")
    want = case.run(workspace=space)
    assert not halves(case, config, want, space, "cuda")
    tokens, experts = case.x.shape[0], case.w13.shape[0]
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).cuda()
    widths = (8, 16, 24, 32, 48, 64, 72, 96, 128, 192, 256, 384, 512, 1024)
    edges = sorted({0, 1, tokens, *(width + step for width in widths for step in (-1, 0, 1))})
    evenly = torch.arange(tokens, device="cuda") % (experts - 1) + 1
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for count in (each for each in edges if each <= tokens):
        for others in (evenly, torch.full_like(evenly, experts - 1)):
            ids = torch.where(order < count, 0, others)[:, None].int()
            different += (bits(case.but(topk_ids=ids).run(workspace=space)) != bits(want)).sum()
    assert int(different) == 0


@pytest.mark.parametrize("name", ["block-bf16", "tensor-bf16"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_thousand_runs(layer: str, name: str, moe_case: CaseMaker) -> None:
    """Back to back in a graph, where each call starts while the one before it ends, and over dirty memory."""
    case = equal_experts(name, layer, moe_case)
    space = torch.empty(config_of(case).layout.bytes, dtype=torch.uint8, device="cuda")
    want = case.run(workspace=space)
    outs = torch.empty(10, *want.shape, dtype=want.dtype, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            case.run(workspace=space, out=out)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for fill in range(100):
        space.fill_(fill)
        fill_nan_(outs)
        graph.replay()
        different += (bits(outs) != bits(want)).sum()
    assert int(different) == 0


def test_with_workspace_and_out_nothing_is_allocated(moe_case: CaseMaker) -> None:
    for layer in ("few pairs", "low", "64 rows", "large"):
        case = equal_experts("block-bf16", layer, moe_case)
        space = torch.empty(config_of(case).layout.bytes, dtype=torch.uint8, device="cuda")
        out = torch.empty_like(case.x)
        case.run(workspace=space, out=out)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        case.run(workspace=space, out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def dense(case: Any) -> torch.Tensor:
    """[T, H] float64 on the GPU: the weighted sum over each token's equal experts."""
    quant, scales = hpc_moe.quant.quant_name(case.quant), case.quant
    first = reference.dequantise_weight(case.w13[0], scales.w13_scale[0])
    second = reference.dequantise_weight(case.w2[0], scales.w2_scale[0])
    gate, up = (reference._input(case.x, quant, scales.x_scale) @ first.T).chunk(2, 1)
    act = reference.activation(gate, up, None)
    y = reference._between(act, quant, getattr(scales, "act_scale", None)) @ second.T
    return y * case.topk_weights.double().sum(1, keepdim=True)


def errors(result: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative RMS error over the output, and the largest of any token; on the GPU."""
    off, size = (result.double() - want).square().mean(1), want.square().mean(1)
    return torch.stack([(off.mean() / size.mean()).sqrt(), (off / size).sqrt().max()])


@pytest.mark.parametrize("name", ["block-e4m3", "tensor-bf16"])
def test_every_average(name: str, moe_case: CaseMaker) -> None:
    """1 to 300 rows an expert on average, and a token more or less: no size hangs, and none is wrong (M1)."""
    most = 300 * 16 + 1
    case = with_equal_experts(moe_case(name, most, 8, 128, 256, 128, dead=0.0, device="cuda"))
    want = dense(case)
    worst = torch.zeros(2, dtype=torch.float64, device="cuda")
    for tokens in sorted({16 * average + step for average in range(1, 301) for step in (-1, 0, 1)}):
        worst = torch.maximum(worst, errors(case.tokens(slice(0, tokens)).run(), want[:tokens]))
    assert worst[0] <= LOOSE and worst[1] <= LOOSE_WORST, worst


@pytest.mark.parametrize("name", ["block-bf16", "tensor-e4m3"])
@pytest.mark.parametrize("tokens", [32_768, 32_769, 100_001, 262_144])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_chunks(name: str, tokens: int, batch_invariant: bool, moe_case: CaseMaker) -> None:
    """Up to the most tokens of a call: in chunks of equal size, each of which gives what the whole should."""
    case = with_equal_experts(moe_case(name, tokens, 2, 8, 128, 64, dead=0.0, device="cuda"))
    case = case.but(batch_invariant=batch_invariant)
    config = config_of(case)
    assert config.num_chunks == -(-tokens // 32_768)
    result = case.run()
    found = errors(result, dense(case))
    assert found[0] <= LOOSE and found[1] <= LOOSE_WORST, found
    edge = min(config.chunk_tokens, tokens)
    for some in (slice(0, 40), slice(edge - 40, edge + 40), slice(tokens - 300, tokens)) if batch_invariant else ():
        assert torch.equal(bits(case.tokens(some).run()), bits(result[some]))
