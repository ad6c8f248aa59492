"""One whole MoE layer's decode step: attention, router and experts of three packages, as a model would call them.

Held to the same step composed of the float64 references, where nothing is rounded but what enters the next operator.
"""

from collections.abc import Sequence

import hpc_attention
import hpc_attention.support
import hpc_moe
import hpc_moe.support
import hpc_router_gemm
import hpc_router_gemm.support
import pytest
import torch
from hpc_common import metrics
from hpc_common.capability import lookup
from hpc_common.reference import attention as attention_reference
from hpc_common.reference import moe as moe_reference
from hpc_common.reference import router as router_reference
from hpc_tools.layer import FP8, Layer, LayerShape, make_layer

pytestmark = pytest.mark.usefixtures("one_thread")

# I a multiple of 128, and one that tensor parallelism cut to 64; 2 and 1 KV heads; pages of 16 and 64.
SHAPES = {
    "block128": LayerShape("two KV heads", 256, 8, 2, 64, 16, 16, 4, 128),
    "block64": LayerShape("one KV head", 384, 6, 1, 128, 64, 24, 3, 192),
}
LENGTHS = [700, 1, 64, 65, 0, 130, 333, 1500]
# Rounding attention's output to bf16 moves some of x's bf16 values by an ulp, and those some of its e4m3 codes, whose
# steps are 6 to 12 percent: seen to give 0.008 to 0.025 over a batch and up to 0.047 in a token.
RMS, TOKEN_RMS = 0.035, 0.07
# Scores of standard deviation 1 move less than this for the same reason.
MARGIN = 0.02


def all_on_gpu() -> bool:
    """Whether every operator of the step has a kernel for it."""
    tables = {
        "decode": (hpc_attention.support, ["16-bit query, e4m3 cache", "head_dim 64", "head_dim 128"]),
        "route": (hpc_router_gemm.support, ["fp32 weight, terms 1 to 3"]),
        "fused_moe": (hpc_moe.support, ["block FP8, bf16 x"]),
    }
    return all(
        lookup(support.SUPPORT, operator, feature).cuda
        for operator, (support, features) in tables.items()
        for feature in features
    )


DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if all_on_gpu() else [])]


def dense(layer: Layer, attention: torch.Tensor) -> torch.Tensor:
    """The torch part between attention and router, row by row so that a row's bits depend on that row alone."""
    rows = []
    for row in range(len(attention)):
        flat = attention[row].to("cpu", torch.float64).flatten()
        hidden = layer.residual[row].double() + layer.w_o.double() @ flat
        rows.append(hidden * torch.rsqrt(hidden.square().mean() + 1e-6) * layer.norm.double())
    return torch.stack(rows).to(torch.bfloat16)


def operators(
    layer: Layer, requests: Sequence[int], device: str, batch_invariant: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step of some of a layer's requests through the operators: out [B, H] bf16 and topk_ids [B, k], on the CPU."""
    shape, cache, index = layer.shape, layer.cache, torch.tensor(requests)
    plan = hpc_attention.DecodePlan(
        max_batch=len(layer.lengths),
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        kv_dtype=FP8,
        device=device,
        batch_invariant=batch_invariant,
        max_seq_len=2048,
    )
    plan.update(cache.seq_lens[index].to(device))
    tensors = (layer.q[index], cache.k_cache, cache.v_cache, cache.page_table[index])
    attended = hpc_attention.decode(
        *(tensor.to(device) for tensor in tensors), plan, k_scale=layer.k_scale, v_scale=layer.v_scale
    )
    layer_rows = Layer(**{**vars(layer), "residual": layer.residual[index]})
    x = dense(layer_rows, attended).to(device)
    router = hpc_router_gemm.RouterWeight(layer.router.to(device), terms=2)
    ids, weights = hpc_router_gemm.route(x, router, shape.top_k)
    quant = hpc_moe.Fp8Block(layer.w13_scale.to(device), layer.w2_scale.to(device))
    out = hpc_moe.fused_moe(
        x, layer.w13.to(device), layer.w2.to(device), ids, weights, quant=quant, batch_invariant=batch_invariant
    )
    return out.cpu(), ids.cpu()


def references(layer: Layer) -> tuple[torch.Tensor, router_reference.Route]:
    """The same step in float64: out [B, H] and the reference's choice of experts."""
    cache = layer.cache
    attended, _ = attention_reference.decode(
        layer.q,
        cache.k_cache,
        cache.v_cache,
        cache.page_table,
        layer.lengths,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
    )
    x = dense(layer, attended)
    chosen = router_reference.route(router_reference.scores(x, layer.router), layer.shape.top_k)
    out = moe_reference.fused_moe(
        x,
        layer.w13,
        layer.w2,
        chosen.ids,
        chosen.weights,
        "block",
        w13_scale=layer.w13_scale,
        w2_scale=layer.w2_scale,
    )
    return out, chosen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_step_equals_the_composed_reference(name: str, seed: int, device: str) -> None:
    layer = make_layer(SHAPES[name], LENGTHS, seed)
    out, ids = operators(layer, range(len(LENGTHS)), device)
    expected, chosen = references(layer)
    decided = chosen.margin > MARGIN
    assert int(decided.sum()) >= len(LENGTHS) - 3
    assert torch.equal(ids[decided].long().sort(1).values, chosen.ids[decided].sort(1).values)
    same = (ids.long().sort(1).values == chosen.ids.sort(1).values).all(1)
    assert metrics.error(out[same], expected[same]).relative_rms <= RMS
    assert float(metrics.relative_rms_rows(out[same], expected[same]).max()) <= TOKEN_RMS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SHAPES)
def test_requests_of_a_batch_invariant_step_do_not_see_each_other(name: str, device: str) -> None:
    layer = make_layer(SHAPES[name], LENGTHS, 0)
    everyone = list(range(len(LENGTHS)))
    together, ids = operators(layer, everyone, device, batch_invariant=True)
    shuffled = everyone[::-1]
    backwards, ids_backwards = operators(layer, shuffled, device, batch_invariant=True)
    assert torch.equal(backwards, together[shuffled]) and torch.equal(ids_backwards, ids[shuffled])
    for request in (0, 4, 7):
        alone, ids_alone = operators(layer, [request], device, batch_invariant=True)
        assert torch.equal(alone[0], together[request]) and torch.equal(ids_alone[0], ids[request])


@pytest.mark.parametrize("device", DEVICES)
def test_step_is_bit_identical_from_run_to_run(device: str) -> None:
    layer = make_layer(SHAPES["block64"], LENGTHS, 2)
    first, second = (operators(layer, range(len(LENGTHS)), device) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_a_layer_that_is_wrong_somewhere_is_found() -> None:
    """What the tolerance must tell apart: one tile of a cache, a neighbour's scales, one swapped expert."""
    layer = make_layer(SHAPES["block128"], LENGTHS, 0)
    expected, chosen = references(layer)

    def error(faulty: Layer) -> float:
        out, ids = operators(faulty, range(len(LENGTHS)), "cpu")
        return float(metrics.relative_rms_rows(out, expected).max())

    def changed(**fields: object) -> Layer:
        return Layer(**{**vars(layer), **fields})

    cache = layer.cache
    table = cache.page_table.clone()
    table[0, :4] = table[0, 4:8]  # the first 64 tokens of request 0 are read from elsewhere
    assert error(changed(cache=type(cache)(cache.k_cache, cache.v_cache, table, cache.seq_lens))) > 2 * TOKEN_RMS
    assert error(changed(w2_scale=layer.w2_scale.roll(1, 0))) > 2 * TOKEN_RMS
    w13, expert = layer.w13.clone(), int(chosen.ids[0, 0])
    w13[expert] = layer.w13[(expert + 1) % layer.shape.num_experts]
    assert error(changed(w13=w13)) > 2 * TOKEN_RMS
