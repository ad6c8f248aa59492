"""How a mixture's weights and activations are quantised: what ``fused_moe`` takes as ``quant``, and the exact rounding.

All scales multiply stored values: value = stored * scale.
"""

from dataclasses import dataclass

import torch
from hpc_common.checks import check_int, check_shape, check_tensor, fail, shape_text

E4M3_MAX = 448.0
# A group whose largest magnitude is below this counts as zero. From here on both amax / 448 and 448 / amax are normal
# fp32 numbers, so flushing subnormals (or not) gives the same bits.
MIN_AMAX = 2.0**-117
# The smallest normal fp32: a static scale below it counts as zero.
MIN_SCALE = 2.0**-126


@dataclass(frozen=True)
class Fp8Block:
    """Block FP8: e4m3 weights with fp32 scales per block, activations quantised per group of columns.

    With b = 128, or 64 where I is not a multiple of 128:

    w13_scale: [E, 2I/b, H/128] fp32, contiguous.
    w2_scale: [E, H/128, I/b] fp32, contiguous.
    x_scale: [T, H/128] fp32, any strides, with an e4m3 ``x``; None with a bf16 ``x``, which is then quantised inside.

    The activations between the GEMMs are quantised inside, per b columns of I.
    """

    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    x_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Fp8Tensor:
    """Per-tensor FP8: e4m3 weights with one fp32 scale an expert, activations with static scales.

    w13_scale: [E] fp32. w2_scale: [E] fp32.
    x_scale: [1] fp32, of ``x`` (a bf16 ``x`` is quantised with it).
    act_scale: [1] fp32, of the activations between the GEMMs, which are quantised with it.
    """

    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    x_scale: torch.Tensor
    act_scale: torch.Tensor


def quant_name(quant: Fp8Block | Fp8Tensor | None) -> str:
    """ "none", "block" or "tensor"; "" for anything else."""
    if quant is None:
        return "none"
    return {Fp8Block: "block", Fp8Tensor: "tensor"}.get(type(quant), "")


def block_of(intermediate: int) -> int:
    """Elements of I that share a scale under Fp8Block: 128, or 64 where I is not a multiple of 128."""
    return 128 if intermediate % 128 == 0 else 64


def quantize_groups(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows per ``group`` consecutive columns, as ``fused_moe`` does inside.

    In fp32: scale = amax / 448, q = e4m3(clamp(value * (448 / amax), -448, 448)), to nearest even. A group with
    amax < 2^-117 gets scale 0 and zeros.

    Args:
        values: [rows, n], floating point; n a multiple of ``group``.

    Returns e4m3 [rows, n] and fp32 scales [rows, n / group].
    """
    where = "hpc_moe.quantize_groups"
    _check_floating(where, "values", values)
    check_shape(where, "values", values, ("rows", "n"))
    check_int(where, "group", group, 1, 2**31)
    rows, columns = values.shape
    if columns % group:
        fail(where, "values", f"a multiple of {group} columns", columns)
    wide = values.float().reshape(rows, columns // group, group)
    amax = wide.abs().amax(dim=2, keepdim=True)
    # The divisor is 1 where the group is zero, so nothing is divided by 0; the factor is then 0.
    live = (amax >= MIN_AMAX) | amax.isnan()
    # Tensor by tensor: with a number torch may multiply by a rounded reciprocal, one ulp off the quotient.
    largest = torch.full_like(amax, E4M3_MAX)
    factor = torch.where(live, largest / torch.where(live, amax, 1.0), 0.0)
    scale = torch.where(live, amax / largest, 0.0)
    return _saturate(wide * factor).view(rows, columns), scale.view(rows, columns // group)


def quantize_static(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantise with one given scale, as ``fused_moe`` does inside: e4m3(clamp(value * (1 / scale), -448, 448)).

    Args:
        values: floating point, any shape. scale: [1] fp32; below 2^-126 it counts as 0 and the result is 0.
    """
    where = "hpc_moe.quantize_static"
    _check_floating(where, "values", values)
    _check_floating(where, "scale", scale)
    live = scale >= MIN_SCALE
    factor = torch.where(live, 1.0 / torch.where(live, scale, 1.0), 0.0)
    return _saturate(values.float() * factor)


def quantize_weight(weight: torch.Tensor, block_rows: int, block_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights per block of rows and columns, for ``Fp8Block``.

    Args:
        weight: [E, N, K], floating point; N and K multiples of the block.
        block_rows, block_columns: w13: (b, 128); w2: (128, b), with b = ``block_of(I)``.

    Returns e4m3 [E, N, K] and fp32 scales [E, N / block_rows, K / block_columns]. A zero block gets scale 0.
    """
    where = "hpc_moe.quantize_weight"
    _check_floating(where, "weight", weight)
    check_shape(where, "weight", weight, ("E", "N", "K"))
    check_int(where, "block_rows", block_rows, 1, 2**31)
    check_int(where, "block_columns", block_columns, 1, 2**31)
    experts, rows, columns = weight.shape
    if rows % block_rows or columns % block_columns:
        fail(where, "weight", f"multiples of {block_rows} x {block_columns}", shape_text(weight))
    tiles = weight.reshape(experts, rows // block_rows, block_rows, columns // block_columns, block_columns)
    flat = tiles.transpose(2, 3).reshape(-1, block_rows * block_columns)
    q, scale = quantize_groups(flat, block_rows * block_columns)
    shape = (experts, rows // block_rows, columns // block_columns, block_rows, block_columns)
    return q.view(shape).transpose(2, 3).reshape(experts, rows, columns), scale.view(shape[:3])


def _check_floating(where: str, argument: str, value: object) -> None:
    """TypeError unless ``value`` is a floating-point tensor."""
    tensor = check_tensor(where, argument, value)
    if not tensor.is_floating_point():
        fail(where, argument, "a floating-point dtype", tensor.dtype, TypeError)


def _saturate(values: torch.Tensor) -> torch.Tensor:
    """fp32 to e4m3, saturating. The conversion of some torch versions gives the NaN code past 464 without the clamp."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
