"""Argument checks of decode and prefill: metadata only, so they also run under torch.compile; then the values.

Every function takes ``where``, the public function's name, and raises TypeError (wrong type or dtype) or ValueError
(anything else) with operator, argument, what was expected and what came.
"""

import math
import os
from typing import Any

import torch
from hpc_common.checks import (
    check_aligned_16,
    check_contiguous,
    check_dense_last,
    check_dtype,
    check_same_device,
    check_shape,
    check_strides_16,
    check_tensor,
    fail,
    shape_text,
)
from torch._subclasses.fake_tensor import FakeTensor

from .support import device_refusal, dtype_error, limit_error

_FP32 = torch.finfo(torch.float32)
_IN_FP32 = f"a number in fp32's range, at most {_FP32.max:.8g} in size"


def debug_values() -> bool:
    """Whether lengths and page ids of CUDA tensors are checked on the host too (HPC_DEBUG=1, outside a capture)."""
    return os.environ.get("HPC_DEBUG") == "1" and not torch.cuda.is_current_stream_capturing()


def check_memory(where: str, argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``; ValueError where it has no memory to write to (meta, or made under FakeTensorMode)."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        kind = "a fake tensor (FakeTensorMode)" if isinstance(tensor, FakeTensor) else "a meta tensor"
        fail(where, argument, "real memory", kind)
    return tensor


def check_query(where: str, q: torch.Tensor) -> None:
    """q [tokens, Hq, D] with strides and base that 16-byte loads take."""
    check_tensor(where, "q", q)
    if q.dim() != 3:
        fail(where, "q", "shape [tokens, num_q_heads, head_dim]", shape_text(q))
    check_strides_16(where, "q", q)


def check_caches(where: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, operator: str) -> None:
    """k_cache and v_cache [pages, page_size, Hkv, D] of one dtype, each with its own strides; then all the limits."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(where, name, cache)
        if cache.dim() != 4:
            fail(where, name, "shape [pages, page_size, num_kv_heads, head_dim]", shape_text(cache))
    broken = dtype_error(q.dtype, k_cache.dtype, operator)
    if broken:
        fail(where, broken[0], f"dtype {broken[1]}", broken[2], TypeError)
    check_dtype(where, "v_cache", v_cache, (k_cache.dtype,))
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    if q.shape[2] != head_dim:
        fail(where, "k_cache", f"head_dim {q.shape[2]} (the query's)", f"{head_dim} ({shape_text(k_cache)})")
    limit = limit_error(
        head_dim=head_dim, num_q_heads=q.shape[1], num_kv_heads=num_kv_heads, page_size=page_size, q_len=1
    )
    if limit:
        argument, tensor = ("k_cache", k_cache) if limit[0] in ("page_size", "num_kv_heads") else ("q", q)
        fail(where, argument, f"{limit[0]} {limit[1]}", f"{limit[2]} ({shape_text(tensor)})")
    check_shape(where, "v_cache", v_cache, tuple(k_cache.shape))
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_strides_16(where, name, cache)
        check_same_device(where, name, cache, q.device, "q")


def check_page_table(where: str, page_table: torch.Tensor, batch: int, q: torch.Tensor) -> None:
    """page_table [batch, max_pages] int32 with dense rows."""
    check_dtype(where, "page_table", page_table, (torch.int32,))
    check_shape(where, "page_table", page_table, (batch, "max_pages"))
    check_dense_last(where, "page_table", page_table)
    check_same_device(where, "page_table", page_table, q.device, "q")


def number(where: str, argument: str, value: Any, default: float) -> float:
    """``value`` as a finite float in fp32's range, for the arithmetic is fp32; ``default`` for None."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail(where, argument, "a float or None", f"{type(value).__name__} {value!r}", TypeError)
    try:
        result = float(value)
    except OverflowError:  # an int beyond fp64; its digits may be too many to print
        fail(where, argument, _IN_FP32, f"an int of {value.bit_length()} bits")
    if not abs(result) <= _FP32.max:  # NaN too; isfinite comes second, for a compiler's symbolic float has none
        fail(where, argument, _IN_FP32 if math.isfinite(result) else "a finite number", result)
    return result


def check_bool(where: str, argument: str, value: Any) -> bool:
    """``value``, TypeError unless it is a bool."""
    if not isinstance(value, bool):
        fail(where, argument, "a bool", f"{type(value).__name__} {value!r}", TypeError)
    return value


def check_factors(where: str, sm_scale: float, k_factor: float) -> None:
    """The scores are multiplied by both at once."""
    if abs(sm_scale * k_factor) > _FP32.max:
        fail(where, "k_scale", f"sm_scale * k_scale to be {_IN_FP32}", f"{sm_scale} * {k_factor}")


def check_softcap(where: str, softcap: Any) -> float:
    """softcap as a positive float, 0.0 for None."""
    value = number(where, "softcap", softcap, 0.0)
    if softcap is not None and value <= 0:
        fail(where, "softcap", "a positive number or None", softcap)
    if softcap is not None and value < _FP32.tiny:  # its reciprocal would be infinite
        fail(where, "softcap", f"a number in fp32's range, at least {_FP32.tiny:.8g}", softcap)
    return value


def check_scale(
    where: str, argument: str, scale: Any, k_cache: torch.Tensor, q: torch.Tensor, per_token: bool
) -> tuple[torch.Tensor | None, float]:
    """A k_scale or v_scale as (tensor or None, float): exactly one of them is not neutral."""
    if not isinstance(scale, torch.Tensor):
        return None, number(where, argument, scale, 1.0)
    pages, page_size, heads, _ = k_cache.shape
    allowed = [(1,), (heads,), *([(pages, page_size, heads)] if per_token else [])]
    check_dtype(where, argument, scale, (torch.float32,))
    if tuple(scale.shape) not in allowed:
        expected = "a float or shape " + " or ".join(str(list(shape)) for shape in allowed)
        fail(where, argument, expected, shape_text(scale))
    check_dense_last(where, argument, scale)
    check_same_device(where, argument, scale, q.device, "q")
    return scale, 1.0


def check_q_scale(where: str, q_scale: torch.Tensor | None, q: torch.Tensor) -> None:
    """q_scale [tokens, Hq] fp32, given exactly where q is e4m3."""
    if q.dtype != torch.float8_e4m3fn:
        if q_scale is not None:
            check_tensor(where, "q_scale", q_scale)
            fail(where, "q_scale", f"None for a {q.dtype} query", f"a tensor of {shape_text(q_scale)}")
        return
    if q_scale is None:
        fail(where, "q_scale", f"shape {list(q.shape[:2])} for a {q.dtype} query", None)
    check_dtype(where, "q_scale", q_scale, (torch.float32,))
    check_shape(where, "q_scale", q_scale, tuple(q.shape[:2]))
    check_dense_last(where, "q_scale", q_scale)
    check_same_device(where, "q_scale", q_scale, q.device, "q")


def check_sinks(where: str, sinks: torch.Tensor | None, q: torch.Tensor) -> None:
    """sinks [Hq] fp32."""
    if sinks is None:
        return
    check_dtype(where, "sinks", sinks, (torch.float32,))
    check_shape(where, "sinks", sinks, (q.shape[1],))
    check_contiguous(where, "sinks", sinks)
    check_same_device(where, "sinks", sinks, q.device, "q")


def out_dtype(q: torch.Tensor) -> torch.dtype:
    """The output's dtype: the query's, bf16 for an e4m3 query."""
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def check_out(where: str, out: torch.Tensor, q: torch.Tensor) -> None:
    """A caller's ``out``: q's shape, the output's dtype, rows that 16-byte stores take and that lie apart."""
    check_dtype(where, "out", out, (out_dtype(q),))
    check_shape(where, "out", out, tuple(q.shape))
    check_strides_16(where, "out", out)
    span = out.shape[2]  # elements that the dimensions so far take up: the next one's stride must clear them
    for dim in (1, 0) if out.stride(1) <= out.stride(0) else (0, 1):
        if out.shape[dim] > 1:
            if out.stride(dim) < span:
                fail(where, "out", "rows that do not overlap", f"strides {list(out.stride())} ({shape_text(out)})")
            span += out.stride(dim) * (out.shape[dim] - 1)
    check_same_device(where, "out", out, q.device, "q")


def check_alignment(where: str, **tensors: torch.Tensor | None) -> None:
    """Base addresses; needs memory, so it runs inside the operator and not on fake tensors."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_aligned_16(where, name, tensor)


def check_device(where: str, operator: str, used: tuple[str, ...], device: torch.device) -> None:
    """ValueError where the support table has no kernel for the features ``used`` on ``device``.

    Meta tensors pass, for shapes: nothing runs on them.
    """
    if device.type == "meta":
        return
    reason = device_refusal(operator, used, device)
    if reason:
        fail(where, "q", f"a device that runs {operator}", f"{device}: {reason}")


def check_lengths(where: str, lengths: list[int], page_size: int, max_pages: int) -> None:
    """seq_lens from 0 to what a row of the page table holds."""
    for request, length in enumerate(lengths):
        if not 0 <= length <= page_size * max_pages:
            held = f"[0, {page_size * max_pages}] ({max_pages} pages of {page_size} in page_table)"
            fail(where, "seq_lens", f"lengths in {held}", f"{length} (request {request})")


def check_page_ids(
    where: str, page_table: torch.Tensor, visible: list[tuple[int, int]], page_size: int, num_pages: int
) -> None:
    """Page ids of the tokens [begin, end) that each request's rows see; other entries may hold anything."""
    if not visible or not page_table.shape[1]:
        return
    ranges = torch.tensor([(begin // page_size, -(-end // page_size)) for begin, end in visible], device="cpu")
    column = torch.arange(page_table.shape[1], device="cpu")
    used = (column >= ranges[:, :1]) & (column < ranges[:, 1:])
    bad = used & ((page_table < 0) | (page_table >= num_pages))
    if bool(bad.any()):
        request, entry = bad.nonzero()[0].tolist()
        got = f"{int(page_table[request, entry])} at [{request}, {entry}]"
        fail(where, "page_table", f"page ids in [0, {num_pages})", got)
