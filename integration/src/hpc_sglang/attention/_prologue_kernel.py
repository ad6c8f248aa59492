"""The kernel of ``prologue.run``: a grid of tokens and groups of heads, query heads first, a head a warp."""

import triton
import triton.language as tl


@triton.jit
def _norm_and_rotate(row, head, inside, weight, cos, sin, epsilon, HALF: tl.constexpr):
    """RMS norm of each head, rounded as SGLang's own kernel rounds it, then the rotation of its halves; both fp32."""
    dim = tl.arange(0, HALF)
    at = row + head[:, None] * (2 * HALF) + dim[None, :]
    low = tl.load(at, mask=inside[:, None], other=0.0)
    high = tl.load(at + HALF, mask=inside[:, None], other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    factor = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + epsilon)[:, None]
    low = (low * factor * tl.load(weight + dim)[None, :].to(tl.float32)).to(dtype).to(tl.float32)
    high = (high * factor * tl.load(weight + HALF + dim)[None, :].to(tl.float32)).to(dtype).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def norm_rotate_store(
    qkv,  # [T, (Q_HEADS + 2 * KV_HEADS) * 2 * HALF], rows row_stride apart; query heads are written in place
    q_weight,  # [2 * HALF]
    k_weight,
    cos_sin,  # [positions, 2 * HALF]: cosines, then sines; rows cos_sin_stride apart
    positions,  # [T]
    slots,  # [T], where keys and values go
    k_cache,  # [slots, KV_HEADS, 2 * HALF], slots k_stride apart, out
    v_cache,
    row_stride,
    cos_sin_stride,
    k_stride,
    v_stride,
    q_epsilon,
    k_epsilon,
    k_scale,
    v_scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    dim = tl.arange(0, HALF)
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride + dim
    cos = tl.load(angle).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF).to(tl.float32)[None, :]
    slot = tl.load(slots + token).to(tl.int64)
    row = qkv + token * row_stride
    query_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    if PDL:  # what is above was written before the step; attention may start, and waits for the end of this kernel
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if group < query_groups:
        head = group * HEADS + tl.arange(0, HEADS)
        inside = head < Q_HEADS
        low, high = _norm_and_rotate(row, head, inside, q_weight, cos, sin, q_epsilon, HALF)
        at = row + head[:, None] * (2 * HALF) + dim[None, :]
        tl.store(at, low.to(qkv.dtype.element_ty), mask=inside[:, None])
        tl.store(at + HALF, high.to(qkv.dtype.element_ty), mask=inside[:, None])
    else:
        head = (group - query_groups) * HEADS + tl.arange(0, HEADS)
        inside = head < KV_HEADS
        low, high = _norm_and_rotate(row + Q_HEADS * 2 * HALF, head, inside, k_weight, cos, sin, k_epsilon, HALF)
        inner = head[:, None] * (2 * HALF) + dim[None, :]
        value = row + (Q_HEADS + KV_HEADS) * 2 * HALF + inner
        v_low = tl.load(value, mask=inside[:, None], other=0.0).to(tl.float32)
        v_high = tl.load(value + HALF, mask=inside[:, None], other=0.0).to(tl.float32)
        low, high = low.to(qkv.dtype.element_ty).to(tl.float32), high.to(qkv.dtype.element_ty).to(tl.float32)
        key = k_cache + slot * k_stride + inner
        tl.store(key, (low / k_scale).to(qkv.dtype.element_ty).to(k_cache.dtype.element_ty), mask=inside[:, None])
        tl.store(
            key + HALF, (high / k_scale).to(qkv.dtype.element_ty).to(k_cache.dtype.element_ty), mask=inside[:, None]
        )
        out = v_cache + slot * v_stride + inner
        tl.store(out, (v_low / v_scale).to(qkv.dtype.element_ty).to(v_cache.dtype.element_ty), mask=inside[:, None])
        tl.store(
            out + HALF, (v_high / v_scale).to(qkv.dtype.element_ty).to(v_cache.dtype.element_ty), mask=inside[:, None]
        )
