"""Other implementations of the same layer, for benchmarks/moe.py: what is not installed says so and is left out.

A peer computes the whole layer from the same tensors as ``fused_moe``. moe.py compares its output with ours before it
times it, so a peer that was called wrongly gives no number.
"""

from collections.abc import Callable
from typing import Any

import hpc_moe
import torch

Peer = Callable[..., torch.Tensor]


def torch_grouped(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    quant: Any,
) -> torch.Tensor:
    """Sort, gather, torch's grouped GEMMs, SiLU-and-mul, weighted sum: bf16 weights, or FP8 by tensor.

    All experts are local. Nothing waits for the GPU, so a graph can hold it.
    """
    tokens, top_k = topk_ids.shape
    experts = w13.shape[0]
    flat = topk_ids.flatten().long()
    order = flat.argsort(stable=True)
    ends = torch.zeros(experts, dtype=torch.int64, device=x.device)
    ends = ends.scatter_add(0, flat, torch.ones_like(flat)).cumsum(0).to(torch.int32)
    rows = order // top_k

    def product(a: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, weight_scale: Any) -> torch.Tensor:
        if quant is None:
            return torch._grouped_mm(a, weight.transpose(1, 2), offs=ends)
        row_scale = scale.expand(a.shape[0]).contiguous()
        column_scale = weight_scale[:, None].expand(experts, weight.shape[1]).contiguous()
        return torch._scaled_grouped_mm(
            a, weight.transpose(1, 2), row_scale, column_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def pick(values: torch.Tensor) -> torch.Tensor:
        if values.dtype == torch.float8_e4m3fn:  # indexing knows bytes
            return values.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return values[rows]

    scales = (None, None, None, None)
    if quant is not None:
        scales = (quant.x_scale, quant.w13_scale, quant.act_scale, quant.w2_scale)
    gate, up = product(pick(x), w13, scales[0], scales[1]).chunk(2, 1)
    act = torch.nn.functional.silu(gate) * up
    if quant is not None:
        act = hpc_moe.quantize_static(act, quant.act_scale)
    y = product(act, w2, scales[2], scales[3])
    weighted = torch.empty(tokens * top_k, y.shape[1], dtype=torch.float32, device=x.device)
    weighted[order] = y.float() * topk_weights.flatten()[order][:, None]
    return weighted.view(tokens, top_k, -1).sum(1).to(torch.bfloat16)


def _sglang() -> Peer:
    """SGLang's Triton kernels with the configuration it picks; bf16 activations in, their quantisation included."""
    from sglang.srt import distributed
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_moe
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="none"))
    if not distributed.model_parallel_is_initialized():  # its kernels ask for their parallel group: this process alone
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        distributed.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
        distributed.initialize_model_parallel(backend="gloo")

    def call(x: torch.Tensor, w13: Any, w2: Any, ids: torch.Tensor, weights: torch.Tensor, quant: Any) -> torch.Tensor:
        options: dict[str, Any] = {}
        if quant is not None:
            block = isinstance(quant, hpc_moe.Fp8Block)
            options = {"use_fp8_w8a8": True, "w1_scale": quant.w13_scale, "w2_scale": quant.w2_scale}
            if block:
                options["block_shape"] = [128, 128]
            else:
                options |= {"a1_scale": quant.x_scale, "a2_scale": quant.act_scale}
        routed = StandardTopKOutput(weights, ids, torch.empty(0, device=x.device))
        return fused_moe(x, w13, w2, routed, MoeRunnerConfig(inplace=False), **options)

    return call


def find(op: str, intermediate: int, local: bool) -> tuple[dict[str, tuple[Peer, bool]], list[str]]:
    """Peers of a row, and why the others are missing.

    Args:
        op: "moe-tensor", "moe-block" or "moe-bf16". intermediate: I. local: whether all ids are this rank's.

    Returns name -> (function, whether it takes bf16 activations where ours takes e4m3), and sentences.
    """
    peers: dict[str, tuple[Peer, bool]] = {}
    missing = []
    if not local:
        return peers, ["no peer: ids of other ranks"]
    if op == "moe-block":
        missing.append("torch grouped: no scales by block of 128")
    else:
        peers["torch grouped"] = (torch_grouped, False)
    if op == "moe-block" and intermediate % 128:
        missing.append("SGLang Triton: no scales by 64 of I")
    else:
        try:
            peers["SGLang Triton"] = (_sglang(), True)
        except Exception as error:  # not installed, another version, or no driver: in each case, no number
            missing.append(f"SGLang Triton: {type(error).__name__}: {error}"[:120])
    return peers, missing
