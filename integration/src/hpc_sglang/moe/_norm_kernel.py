"""The kernel of ``norm.run``: a program a row."""

import triton
import triton.language as tl


@triton.jit
def add_norm_quantise(
    x,  # [T, HIDDEN], rows x_stride apart; in: what is added, out: normed rows
    residual,  # [T, HIDDEN], rows residual_stride apart; in and out
    weight,  # [HIDDEN]
    quantised,  # [T, HIDDEN] e4m3, out
    scales,  # [T, HIDDEN / 128] fp32, out
    x_stride,
    residual_stride,
    epsilon,
    HIDDEN: tl.constexpr,
    GROUPS: tl.constexpr,  # of 128, a power of two
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    inside = group * 128 < HIDDEN
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = inside[:, None] & (at < HIDDEN)
    factor = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if PDL:  # the gate may start; it reads its weight, and waits for the end of this kernel
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(residual + row * residual_stride + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual + row * residual_stride + at, value.to(residual.dtype.element_ty), mask=mask)
    mean = tl.sum(tl.sum(value * value, 1), 0) / HIDDEN
    normed = (value * tl.rsqrt(mean + epsilon) * factor).to(x.dtype.element_ty)
    tl.store(x + row * x_stride + at, normed, mask=mask)
    # As hpc_moe.quantize_groups: the group's largest magnitude on 448, and 0 for groups that count as zero.
    normed = normed.to(tl.float32)
    largest = tl.max(tl.abs(normed), 1)
    live = largest >= 2.0**-117
    divisor = tl.where(live, largest, 1.0)
    limit = tl.full(divisor.shape, 448.0, tl.float32)
    inverse = tl.where(live, tl.div_rn(limit, divisor), 0.0)
    tl.store(scales + row * (HIDDEN // 128) + group, tl.where(live, tl.div_rn(divisor, limit), 0.0), mask=inside)
    scaled = tl.minimum(tl.maximum(normed * inverse[:, None], -448.0), 448.0)
    tl.store(quantised + row * HIDDEN + at, scaled.to(quantised.dtype.element_ty), mask=mask)
