"""Values of fused_moe against the float64 reference and against plain torch, and faults that the bounds must find."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_common.reference import moe as reference

# (tokens, k, experts, H, I): the low, mid and large regime, I in blocks of 128 and of 64, one and many K blocks.
SHAPES = {
    "low": (24, 4, 8, 384, 256),
    "low-64": (16, 2, 8, 256, 192),
    "one-token": (1, 8, 16, 512, 128),
    "mid": (150, 4, 8, 384, 256),
    "mid-64": (300, 2, 5, 128, 320),
    "large": (330, 2, 3, 256, 128),
    "small-I": (40, 2, 3, 128, 64),
}
CaseMaker = Callable[..., Any]


@pytest.mark.parametrize("shape", SHAPES)
def test_values(kind: tuple[str, str], shape: str, moe_case: CaseMaker) -> None:
    case = moe_case(kind, *SHAPES[shape])
    case.check(case.run())


def test_shapes_reach_every_regime() -> None:
    regimes = set()
    for tokens, top_k, experts, hidden, inter in SHAPES.values():
        sizes = {"num_local_experts": experts, "num_experts": experts, "hidden": hidden, "intermediate": inter}
        regimes.add(hpc_moe._C.make_config(num_tokens=tokens, top_k=top_k, quant="block", **sizes).regime)
    assert regimes == {"low", "mid", "large"}


@pytest.mark.parametrize("tokens", [20, 200])
def test_options(kind: tuple[str, str], tokens: int, moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=tokens)
    shared = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(9)).bfloat16().to(case.x.device)
    case.check(case.run())
    for options in (
        {"swiglu_limit": 0.5},
        {"shared_output": shared},
        {"routed_scaling_factor": 2.5},
        {"swiglu_limit": 1, "shared_output": shared, "routed_scaling_factor": -0.5},
        {"batch_invariant": True},
    ):
        changed = case.but(**options)
        changed.check(changed.run())


def test_every_option_changes_the_result(moe_case: CaseMaker) -> None:
    case = moe_case("block-bf16")
    plain = case.run()
    for options in ({"swiglu_limit": 0.5}, {"shared_output": plain}, {"routed_scaling_factor": 2.5}):
        assert max(case.errors(case.run(**options), plain.double())) > 0.05


def test_out_is_written_and_returned(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    case = moe_case(kind)
    wide = torch.full((case.x.shape[0], case.x.shape[1] + 64), float("nan"), dtype=torch.bfloat16, device=case.x.device)
    out = wide[:, 32:-32]
    assert case.run(out=out) is out
    assert out.equal(case.run())
    assert wide[:, :32].isnan().all() and wide[:, -32:].isnan().all()


def test_strided_inputs(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    case = moe_case(kind)
    want = case.run()
    row = torch.empty(case.x.shape[0], 2 * case.x.shape[1], dtype=case.x.dtype, device=case.x.device)
    row[:, : case.x.shape[1]] = case.x
    ids = torch.full((case.x.shape[0], 11), 3, device=case.x.device)
    ids[:, 2:6] = case.topk_ids
    weights = case.topk_weights.t().contiguous().t()
    strided = case.but(x=row[:, : case.x.shape[1]], topk_ids=ids[:, 2:6], topk_weights=weights)
    if isinstance(case.quant, hpc_moe.Fp8Block) and case.quant.x_scale is not None:
        strided = strided.scales(x_scale=case.quant.x_scale.t().contiguous().t())
    assert strided.run().equal(want)


def plain_torch(case: Any) -> torch.Tensor:
    """Token by token in fp32 with torch's own matmul: nothing shared with the operator or the reference."""
    x, quant = case.x.float(), case.quant
    block = isinstance(quant, hpc_moe.Fp8Block)
    if block:
        x = x * quant.x_scale.repeat_interleave(128, 1)
    elif quant is not None:
        x = x * quant.x_scale
    out = torch.zeros(case.x.shape)
    for token, (ids, weights) in enumerate(zip(case.topk_ids.tolist(), case.topk_weights.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert < 0:
                continue
            w13, w2 = case.w13[expert].float(), case.w2[expert].float()
            if block:
                side = w13.shape[0] // quant.w13_scale.shape[1]
                w13 = w13.unflatten(0, (-1, side)).unflatten(2, (-1, 128)) * quant.w13_scale[expert][:, None, :, None]
                w2 = w2.unflatten(0, (-1, 128)).unflatten(2, (-1, side)) * quant.w2_scale[expert][:, None, :, None]
                w13, w2 = w13.flatten(2).flatten(0, 1), w2.flatten(2).flatten(0, 1)
            elif quant is not None:
                w13, w2 = w13 * quant.w13_scale[expert], w2 * quant.w2_scale[expert]
            gate, up = (w13 @ x[token]).chunk(2)
            act = (gate / (1 + (-gate).exp()) * up).bfloat16().float()
            if block:
                groups = act.view(-1, side)
                scale = groups.abs().amax(1, keepdim=True) / 448
                act = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten()
            elif quant is not None:
                act = (act / quant.act_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * quant.act_scale
            out[token] += weight * (w2 @ act)
    return out.double()


@pytest.mark.kinds("block-e4m3", "tensor-e4m3", "bf16")
@pytest.mark.parametrize("shape", ["low", "mid-64"])
def test_against_plain_torch(kind: tuple[str, str], shape: str, moe_case: CaseMaker) -> None:
    want = plain_torch(moe_case((kind[0], "cpu"), *SHAPES[shape]))
    case = moe_case(kind, *SHAPES[shape])
    case.check(case.run(), want)
    case.check(want.float())  # and the reference agrees with it


@pytest.mark.parametrize("tokens", [24, 150])
def test_outlier_channel(kind: tuple[str, str], tokens: int, moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=tokens)
    x = case.x.float()
    x[:, 77] *= 100
    case = case.but(x=reference.to_e4m3(x) if case.x.dtype == torch.float8_e4m3fn else x.to(case.x.dtype))
    case.check(case.run())


@pytest.mark.kinds("block-bf16", "block-e4m3")
@pytest.mark.parametrize("tokens", [24, 150])
def test_tiny_data(kind: tuple[str, str], tokens: int, moe_case: CaseMaker) -> None:
    """x of 1e-20: gate and up are of that size, unless the weights' scales bring them back."""
    case = moe_case(kind, tokens=tokens)
    if case.quant.x_scale is None:
        case = case.but(x=case.x * 1e-20)
    else:
        case = case.scales(x_scale=case.quant.x_scale * 1e-20)
    case = case.scales(w13_scale=case.quant.w13_scale * 1e20)
    result = case.run()
    case.check(result)
    assert float(result.float().abs().max()) > 0.01
    small = case.scales(w13_scale=case.quant.w13_scale * 1e-12, w2_scale=case.quant.w2_scale * 1e20)
    small.check(small.run())


def _neighbour(case: Any, name: str, dim: int) -> Any:
    return case.scales(**{name: getattr(case.quant, name).roll(1, dim).contiguous()})


def _one_expert(scale: torch.Tensor, factor: float) -> torch.Tensor:
    changed = scale.clone()
    changed[2] *= factor
    return changed


def _drop_k(weight: torch.Tensor, begin: int) -> torch.Tensor:
    changed = weight.clone()
    changed.view(torch.uint8)[:, :, begin : begin + 128] = 0
    return changed


# What a kernel could do wrong, done to its inputs: every one must break the bounds.
MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "w13 scale of the expert before": lambda c: _neighbour(c, "w13_scale", 0),
    "w13 scale of the row block before": lambda c: _neighbour(c, "w13_scale", 1),
    "w13 scale of the K block before": lambda c: _neighbour(c, "w13_scale", 2),
    "w2 scale of the expert before": lambda c: _neighbour(c, "w2_scale", 0),
    "w2 scale of the row block before": lambda c: _neighbour(c, "w2_scale", 1),
    "w2 scale of the K block before": lambda c: _neighbour(c, "w2_scale", 2),
    "x scale of the token before": lambda c: _neighbour(c, "x_scale", 0),
    "x scale of the K block before": lambda c: _neighbour(c, "x_scale", 1),
    "w13 scale a quarter off in one expert": lambda c: c.scales(w13_scale=_one_expert(c.quant.w13_scale, 1.25)),
    "w2 scale a quarter off in one expert": lambda c: c.scales(w2_scale=_one_expert(c.quant.w2_scale, 0.75)),
    "first K tile of gate-up dropped": lambda c: c.but(w13=_drop_k(c.w13, 0)),
    "last K tile of gate-up dropped": lambda c: c.but(w13=_drop_k(c.w13, c.w13.shape[2] - 128)),
    "last K tile of down dropped": lambda c: c.but(w2=_drop_k(c.w2, c.w2.shape[2] - 128)),
    "one expert skipped": lambda c: c.but(topk_ids=torch.where(c.topk_ids == 3, -1, c.topk_ids)),
    "one slot's weight lost": lambda c: c.but(topk_weights=c.topk_weights * (torch.arange(4) != 2)),
    "gate and up exchanged": lambda c: c.but(w13=c.w13.view(torch.uint8).roll(256, 1).view(c.w13.dtype)),
    "one token's row of its neighbour": lambda c: c.but(x=c.x.view(torch.uint8).roll(1, 0).view(c.x.dtype)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("shape", ["low", "mid"])
def test_bounds_find(mutation: str, shape: str, moe_case: CaseMaker) -> None:
    case = moe_case("block-e4m3", *SHAPES[shape])
    want = case.want()
    case.check(case.run(), want)
    broken = MUTATIONS[mutation](case)
    with pytest.raises(AssertionError, match="relative RMS"):
        case.check(broken.run(), want)


@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
@pytest.mark.parametrize("factor", [1.25, 0.75])
def test_bounds_find_a_tensor_scale_off_in_one_expert(name: str, factor: float, moe_case: CaseMaker) -> None:
    case = moe_case("tensor-e4m3")
    broken = replace(case.quant, **{name: _one_expert(getattr(case.quant, name), factor)})
    with pytest.raises(AssertionError, match="relative RMS"):
        case.check(case.but(quant=broken).run(), case.want())
