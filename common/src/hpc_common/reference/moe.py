"""Float64 reference of the fused mixture of experts, with the operator's quantisation points.

The points where the operator rounds are part of its definition, so the reference has them too, in the same arithmetic:

* ``quantise_blocks``: bf16 activations to e4m3 with an fp32 scale per group (amax / 448);
* ``quantise_tensor``: to e4m3 with one static scale;
* the activation between the GEMMs is rounded to bf16, then quantised by one of the two.

Everything else (products, sums, SiLU, the weighted reduction) is float64 and unrounded. The operator's own roundings of
down's rows and of the output to bf16 are errors that the comparison measures.
"""

import torch

E4M3_MAX = 448.0
# A group whose largest magnitude is below this is zero: its scale and the reciprocal then stay normal fp32 numbers,
# so the result doesn't depend on how a device treats subnormals.
MIN_AMAX = 2.0**-117
MIN_SCALE = 2.0**-126


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """fp32 to e4m3, to nearest even, saturating at +-448 (never the NaN code, except for a NaN)."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantise_blocks(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [rows, n] to e4m3 [rows, n] and fp32 scales [rows, n / group]; stored value times scale is the value.

    Per group of consecutive columns, in fp32: scale = amax / 448, inverse = 448 / amax, q = e4m3(value * inverse).
    A group with amax < 2^-117 gets scale 0 and zeros.
    """
    rows, columns = values.shape
    groups = values.float().view(rows, columns // group, group)
    amax = groups.abs().amax(2)
    zero = amax < MIN_AMAX
    # Tensor by tensor: with a number torch multiplies by a rounded reciprocal (on some devices), one ulp off a
    # quotient, and a value halfway between two codes then goes the other way.
    largest = torch.full_like(amax, E4M3_MAX)
    scale = torch.where(zero, 0.0, amax / largest)
    inverse = torch.where(zero, 0.0, largest / amax)
    return to_e4m3(groups * inverse[:, :, None]).view(rows, columns), scale


def quantise_tensor(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 to e4m3 with one static fp32 scale [1]: q = e4m3(value * (1 / scale)); a scale below 2^-126 gives 0."""
    scale = scale.float()
    inverse = torch.where(scale < MIN_SCALE, 0.0, 1.0 / scale)
    return to_e4m3(values.float() * inverse)


def dequantise_weight(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """One expert's weight [N, K] as float64: times scale [N / bn, K / bk] by block, scale [] by tensor, or as it is."""
    wide = weight.to(torch.float64)
    if scale is None:
        return wide
    scale = scale.to(torch.float64)
    if scale.dim() == 0:
        return wide * scale
    rows, columns = (size // blocks for size, blocks in zip(weight.shape, scale.shape, strict=True))
    return wide * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def activation(gate: torch.Tensor, up: torch.Tensor, swiglu_limit: float | None = None) -> torch.Tensor:
    """silu(min(gate, L)) * clamp(up, -L, L); without a limit L is infinite."""
    if swiglu_limit is not None:
        gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return gate * torch.sigmoid(gate) * up


def _input(x: torch.Tensor, quant: str, x_scale: torch.Tensor | None) -> torch.Tensor:
    """What the first GEMM multiplies, as float64 [T, H]."""
    if quant == "block":
        q, scale = (x, x_scale) if x.dtype == torch.float8_e4m3fn else quantise_blocks(x, 128)
        return q.double() * scale.double().repeat_interleave(128, 1)
    if quant == "tensor":
        q = x if x.dtype == torch.float8_e4m3fn else quantise_tensor(x, x_scale)
        return q.double() * x_scale.double()
    return x.double()


def _between(act: torch.Tensor, quant: str, act_scale: torch.Tensor | None) -> torch.Tensor:
    """The activation as the second GEMM sees it, float64 [n, I] in and out."""
    rounded = act.to(torch.bfloat16)
    if quant == "block":
        group = 128 if act.shape[1] % 128 == 0 else 64
        q, scale = quantise_blocks(rounded, group)
        return q.double() * scale.double().repeat_interleave(group, 1)
    if quant == "tensor":
        return quantise_tensor(rounded, act_scale).double() * act_scale.double()
    return rounded.double()


def fused_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    quant: str = "none",
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    act_scale: torch.Tensor | None = None,
    ep_rank: int = 0,
    swiglu_limit: float | None = None,
    shared_output: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> torch.Tensor:
    """The operator in float64 on the CPU, expert by expert.

    Args:
        x: [T, H] bf16, or e4m3 with x_scale. w13: [E, 2I, H], gate rows first. w2: [E, H, I].
        topk_ids: [T, k] global ids; those outside [ep_rank * E, (ep_rank + 1) * E) are skipped with their weights.
        topk_weights: [T, k] fp32.
        quant: "none" (bf16), "block" (w13_scale [E, 2I/b, H/128], w2_scale [E, H/128, I/b], x_scale [T, H/128]; b is
            128, or 64 where I is not a multiple of 128) or "tensor" (w13_scale [E], w2_scale [E], x_scale [1],
            act_scale [1]).
        shared_output: [T, H], added.

    Returns [T, H] float64: routed_scaling_factor * sum over k of weight * down(act) + shared_output.
    """
    args = (x, w13, w2, topk_ids, topk_weights, w13_scale, w2_scale, x_scale, act_scale, shared_output)
    x, w13, w2, topk_ids, topk_weights, w13_scale, w2_scale, x_scale, act_scale, shared_output = (
        None if tensor is None else tensor.detach().cpu() for tensor in args
    )
    experts, half = w13.shape[0], w13.shape[1] // 2
    wide = _input(x, quant, x_scale)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(experts):
        tokens, slots = (topk_ids == ep_rank * experts + expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate_up = wide[tokens] @ dequantise_weight(w13[expert], None if w13_scale is None else w13_scale[expert]).T
        act = activation(gate_up[:, :half], gate_up[:, half:], swiglu_limit)
        down = dequantise_weight(w2[expert], None if w2_scale is None else w2_scale[expert])
        rows = _between(act, quant, act_scale) @ down.T
        total.index_add_(0, tokens, rows * topk_weights[tokens, slots].double()[:, None])
    total *= routed_scaling_factor
    return total if shared_output is None else total + shared_output.double()
