"""Argument checks of ``fused_moe``: metadata only, so they also run while torch.compile traces."""

import sys
from typing import Any

import torch
from hpc_common.checks import (
    check_contiguous,
    check_dtype,
    check_int,
    check_same_device,
    check_shape,
    check_strides_16,
    check_tensor,
    fail,
    shape_text,
)

from .quant import Fp8Block, Fp8Tensor, block_of, quant_name
from .workspace import MoeWorkspace

WHERE = "hpc_moe.fused_moe"
E4M3 = torch.float8_e4m3fn
MAX_TOKENS = 262144
MAX_TOP_K = 32
MAX_EXPERTS = 512


def check_quant(quant: Any) -> str:
    """The name of ``quant``; TypeError for anything but None, Fp8Block and Fp8Tensor."""
    name = quant_name(quant)
    if not name:
        fail(WHERE, "quant", "None, Fp8Block or Fp8Tensor", type(quant).__name__, TypeError)
    return name


def check_weights(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, quant: str) -> tuple[int, int, int]:
    """Check x, w13 and w2 against each other; returns (E, H, I)."""
    for name, tensor in (("x", x), ("w13", w13), ("w2", w2)):
        check_tensor(WHERE, name, tensor)
    check_dtype(WHERE, "x", x, (torch.bfloat16,) if quant == "none" else (torch.bfloat16, E4M3))
    check_shape(WHERE, "x", x, ("T", "H"))
    hidden = x.shape[1]
    if hidden < 128 or hidden % 128:
        fail(WHERE, "x", "a hidden size H that is a positive multiple of 128", f"{hidden} ({shape_text(x)})")
    if x.shape[0] > MAX_TOKENS:
        fail(WHERE, "x", f"at most {MAX_TOKENS} tokens", shape_text(x))
    check_strides_16(WHERE, "x", x)

    weight_dtype = torch.bfloat16 if quant == "none" else E4M3
    check_dtype(WHERE, "w13", w13, (weight_dtype,))
    check_shape(WHERE, "w13", w13, ("E", "2I", hidden))
    experts, rows = w13.shape[0], w13.shape[1]
    if not 1 <= experts <= MAX_EXPERTS:
        fail(WHERE, "w13", f"1 to {MAX_EXPERTS} experts on a rank", shape_text(w13))
    if rows < 128 or rows % 128:
        fail(WHERE, "w13", "2I rows with I a positive multiple of 64", f"2I = {rows} ({shape_text(w13)})")
    check_contiguous(WHERE, "w13", w13)
    check_dtype(WHERE, "w2", w2, (weight_dtype,))
    check_shape(WHERE, "w2", w2, (experts, hidden, rows // 2))
    check_contiguous(WHERE, "w2", w2)
    return experts, hidden, rows // 2


def check_routing(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Check topk_ids and topk_weights [T, k] against x."""
    check_dtype(WHERE, "topk_ids", topk_ids, (torch.int32, torch.int64))
    check_shape(WHERE, "topk_ids", topk_ids, (x.shape[0], "k"))
    top_k = topk_ids.shape[1]
    if not 1 <= top_k <= MAX_TOP_K:
        fail(WHERE, "topk_ids", f"k from 1 to {MAX_TOP_K}", f"{top_k} ({shape_text(topk_ids)})")
    check_dtype(WHERE, "topk_weights", topk_weights, (torch.float32,))
    check_shape(WHERE, "topk_weights", topk_weights, (x.shape[0], top_k))


def _check_scale(name: str, scale: Any, shape: tuple[int, ...], contiguous: bool = True) -> None:
    check_dtype(WHERE, name, scale, (torch.float32,))
    check_shape(WHERE, name, scale, shape)
    if contiguous:
        check_contiguous(WHERE, name, scale)


def check_scales(x: torch.Tensor, experts: int, hidden: int, inter: int, quant: Fp8Block | Fp8Tensor | None) -> None:
    """Check the scales' dtypes and shapes."""
    if isinstance(quant, Fp8Block):
        block = block_of(inter)
        _check_scale("quant.w13_scale", quant.w13_scale, (experts, 2 * inter // block, hidden // 128))
        _check_scale("quant.w2_scale", quant.w2_scale, (experts, hidden // 128, inter // block))
        if x.dtype == E4M3:
            if quant.x_scale is None:
                fail(WHERE, "quant.x_scale", f"shape [T, {hidden // 128}] with an e4m3 x", None)
            _check_scale("quant.x_scale", quant.x_scale, (x.shape[0], hidden // 128), contiguous=False)
        elif quant.x_scale is not None:
            fail(WHERE, "quant.x_scale", "None with a bf16 x (it is quantised inside)", "a tensor")
    elif isinstance(quant, Fp8Tensor):
        _check_scale("quant.w13_scale", quant.w13_scale, (experts,))
        _check_scale("quant.w2_scale", quant.w2_scale, (experts,))
        _check_scale("quant.x_scale", quant.x_scale, (1,))
        _check_scale("quant.act_scale", quant.act_scale, (1,))


def check_ranks(ep_rank: Any, num_experts: Any, experts: int) -> int:
    """The number of experts over all ranks. None means E and is only right on a single rank."""
    check_int(WHERE, "ep_rank", ep_rank, 0, 2**16 - 1)
    if num_experts is None:
        if ep_rank != 0:
            fail(WHERE, "num_experts", f"the number of experts over all ranks with ep_rank={ep_rank}", None)
        return experts
    return check_int(WHERE, "num_experts", num_experts, (ep_rank + 1) * experts, 2**16)


def check_number(name: str, value: Any, positive: bool) -> float:
    """``value`` as a finite float; TypeError for other types, ValueError for a value out of range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail(WHERE, name, "a float", f"{type(value).__name__} {value!r}", TypeError)
    # Comparisons trace where math.isfinite does not, and refuse an int that no float holds.
    if not -sys.float_info.max <= value <= sys.float_info.max or (positive and value <= 0):
        fail(WHERE, name, "a positive finite number" if positive else "a finite number", value)
    return float(value)


def check_output(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    """Check a bf16 [T, H] tensor (out, shared_output)."""
    check_dtype(WHERE, name, tensor, (torch.bfloat16,))
    check_shape(WHERE, name, tensor, tuple(x.shape))
    check_strides_16(WHERE, name, tensor)


def check_rows_apart(name: str, tensor: torch.Tensor) -> None:
    """ValueError where rows of a [T, H] tensor share memory, as those of an expanded one do: a result is written."""
    if tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        expected = f"rows that do not overlap (stride(0) of at least {tensor.shape[1]})"
        fail(WHERE, name, expected, f"stride {tensor.stride(0)} ({shape_text(tensor)})")


def workspace_buffer(workspace: Any) -> torch.Tensor | None:
    """The uint8 buffer of a workspace (a MoeWorkspace, a uint8 tensor or None)."""
    buffer = workspace.buffer if isinstance(workspace, MoeWorkspace) else workspace
    if buffer is not None:
        if not isinstance(buffer, torch.Tensor):
            fail(WHERE, "workspace", "a MoeWorkspace or a uint8 tensor", type(workspace).__name__, TypeError)
        check_dtype(WHERE, "workspace", buffer, (torch.uint8,))
        check_shape(WHERE, "workspace", buffer, ("bytes",))
        check_contiguous(WHERE, "workspace", buffer)
    return buffer


def check_devices(x: torch.Tensor, tensors: dict[str, torch.Tensor | None]) -> None:
    """ValueError unless every tensor lies on x's device."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_same_device(WHERE, name, tensor, x.device, "x")


def check_ids(topk_ids: torch.Tensor, num_experts: int) -> None:
    """ValueError for an id outside [-1, num_experts). Reads values: CPU tensors, or HPC_DEBUG=1 outside a capture."""
    bad = (topk_ids < -1) | (topk_ids >= num_experts)
    if bool(bad.any()):
        token, slot = (int(index) for index in bad.nonzero()[0])
        got = f"{int(topk_ids[token, slot])} at token {token}, slot {slot}"
        fail(WHERE, "topk_ids", f"ids in [-1, {num_experts})", got)
