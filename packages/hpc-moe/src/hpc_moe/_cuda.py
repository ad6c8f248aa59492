"""``fused_moe`` on a Hopper GPU: hands a checked call to the kernels (csrc/launch/call.cu), in the current stream."""

from typing import TYPE_CHECKING

import torch

from . import _C

if TYPE_CHECKING:
    from .fused_moe import Call

_QUANT = {"none": 0, "block": 1, "tensor": 2}  # csrc/config/config.hpp, Quant


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def run(call: "Call") -> None:
    """Launch the kernels that fill ``call.out``; returns before they end."""
    x, shared = call.x, call.shared_output
    row_scales = call.quant == "block" and call.x_scale is not None
    _C.fused_moe(
        config=call.config,
        quant=_QUANT[call.quant],
        tokens=x.shape[0],
        top_k=call.topk_ids.shape[1],
        num_local=call.w13.shape[0],
        hidden=x.shape[1],
        intermediate=call.w2.shape[2],
        ep_rank=call.ep_rank,
        x=x.data_ptr(),
        x_stride=x.stride(0),
        x_is_bf16=x.dtype == torch.bfloat16,
        w13=call.w13.data_ptr(),
        w2=call.w2.data_ptr(),
        topk_ids=call.topk_ids.data_ptr(),
        ids_are_int64=call.topk_ids.dtype == torch.int64,
        id_token_stride=call.topk_ids.stride(0),
        id_slot_stride=call.topk_ids.stride(1),
        topk_weights=call.topk_weights.data_ptr(),
        weight_token_stride=call.topk_weights.stride(0),
        weight_slot_stride=call.topk_weights.stride(1),
        w13_scale=_address(call.w13_scale),
        w2_scale=_address(call.w2_scale),
        x_scale=_address(call.x_scale),
        x_scale_stride=call.x_scale.stride(0) if row_scales else 0,
        x_scale_step=call.x_scale.stride(1) if row_scales else 0,
        act_scale=_address(call.act_scale),
        swiglu_limit=-1.0 if call.swiglu_limit is None else call.swiglu_limit,
        shared_output=_address(shared),
        shared_stride=0 if shared is None else shared.stride(0),
        routed_scaling_factor=call.routed_scaling_factor,
        workspace=call.workspace.data_ptr(),
        out=call.out.data_ptr(),
        out_stride=call.out.stride(0),
        device=x.device.index,
        stream=torch.cuda.current_stream(x.device).cuda_stream,
    )
