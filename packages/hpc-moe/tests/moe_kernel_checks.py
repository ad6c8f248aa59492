"""What holds of a GPU's FP8 result: the two GEMMs apart, by the activation that the kernels leave in the workspace.

The tensor core adds e4m3 products in about 14 bits (DESIGN.md, "Accuracy"). So an activation near a rounding boundary
may become the neighbouring e4m3 value, and where few activations make up a token one such step is a few percent of it.
Neither is an error of the kernel, and neither may hide one: the activation must be the exact one within half a step of
e4m3 and what sums in 14 bits may be off, and the output must be the second GEMM of that activation, with no allowance.
"""

from typing import Any

import hpc_moe
import torch
from hpc_common.capability import capability
from hpc_common.metrics import error, relative_rms_rows
from hpc_common.reference import moe as reference
from hpc_moe import _C

OVERALL, WORST = 0.006, 0.02  # the operator's bounds
SECOND = 0.004  # relative RMS of the second GEMM and the reduction: two roundings to bf16 make 0.0023
# Bounds of the whole where an activation may round the other way and a token may have few of them.
LOOSE, LOOSE_WORST = 0.02, 0.1


def config_of(case: Any) -> Any:
    """The Config that the call of ``case`` uses on the GPU."""
    return _C.make_config(
        num_tokens=case.x.shape[0],
        top_k=case.topk_ids.shape[1],
        num_local_experts=case.w13.shape[0],
        num_experts=case.options.get("num_experts") or case.w13.shape[0],
        hidden=case.x.shape[1],
        intermediate=case.w2.shape[2],
        quant=hpc_moe.quant.quant_name(case.quant),
        x_is_bf16=case.x.dtype == torch.bfloat16,
        batch_invariant=case.options.get("batch_invariant", False),
        num_sms=capability("cuda").num_sms,
    )


def check(case: Any, result: torch.Tensor, want: torch.Tensor) -> None:
    """Hold ``result`` of a GPU to the operator's bounds: whole where sums are fp32, else as two halves."""
    rows = relative_rms_rows(result, want)
    overall, worst = error(result, want).relative_rms, float(rows.max()) if rows.numel() else 0.0
    text = f"relative RMS {overall:.5f} over the output, {worst:.5f} in a token"
    config = config_of(case)
    if case.quant is None or config.regime == "low" or config.exact or config.num_chunks != 1:
        assert overall <= OVERALL and worst <= WORST, text
        return
    assert overall <= LOOSE and worst <= LOOSE_WORST, text
    space = torch.full((config.layout.bytes,), 255, dtype=torch.uint8, device=case.x.device)
    wrong = halves(case, config, case.run(workspace=space), space)
    assert not wrong, wrong


def halves(case: Any, config: Any, result: torch.Tensor, space: torch.Tensor, device: str = "cpu") -> str:
    """Compare the activation in the workspace ``space``, and ``result``, each with what it was made from.

    Args:
        case: x, w13, w2, topk_ids, topk_weights, quant (FP8) and options of a call; of one chunk.
        config, result, space: the call's Config, its output, and the workspace that it left.
        device: where the float64 arithmetic runs.

    Returns what is wrong, "" for nothing.
    """
    quant = hpc_moe.quant.quant_name(case.quant)
    experts, inter, block, rows = case.w13.shape[0], case.w2.shape[2], config.act_group, config.chunk_rows
    scales = {name: value.to(device) for name, value in vars(case.quant).items() if value is not None}
    limit, rank = case.options.get("swiglu_limit"), case.options.get("ep_rank", 0)

    def view(offset: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        part = space[offset : offset + rows * width * dtype.itemsize]
        return part.view(dtype).view(rows, width).to(device).double()

    h = view(config.layout.h, inter, torch.bfloat16 if config.h_is_bf16 else torch.float8_e4m3fn)
    scale = None  # of each element of h; none where it is bf16
    if quant == "tensor":
        scale = scales["act_scale"].double().expand(rows, inter)
    elif not config.h_is_bf16:
        scale = view(config.layout.h_scale, inter // block, torch.float32).repeat_interleave(block, 1)
    h = h if scale is None else h * scale
    wide = reference._input(case.x.to(device), quant, scales.get("x_scale"))
    ids, weights = case.topk_ids.to(device), case.topk_weights.to(device)
    total = torch.zeros(wide.shape, dtype=torch.float64, device=device)
    begin = 0
    for expert in range(experts):
        tokens, slots = (ids == rank * experts + expert).nonzero(as_tuple=True)
        mine = slice(begin, begin + len(tokens))
        begin += len(tokens)
        if not len(tokens):
            continue
        first = reference.dequantise_weight(case.w13[expert].to(device), scales["w13_scale"][expert])
        gate, up = (wide[tokens] @ first.T).chunk(2, 1)
        act = reference.activation(gate, up, limit)
        # 132 truncations of at most 2^-13 of the largest product in each sum of 128, in rms 2^-10.3 of it: five such.
        share = 2.0**-16 if config.regime == "low" or config.exact else 2.0**-8
        off = (wide[tokens].square() @ first.square().T).sqrt() * share
        off_gate, off_up = off.chunk(2, 1)
        up = up if limit is None else up.clamp(-limit, limit)
        off = 1.1 * (up.abs() + off_up) * off_gate + (gate * torch.sigmoid(gate)).abs() * off_up
        allowed = act.abs() * 2.0**-8 + off
        if scale is not None:
            own = scale[mine]
            if quant == "block":
                largest, most_off = (each.view(len(tokens), -1, block).amax(2) for each in (act.abs(), off))
                apart = (own[:, ::block] * 448 - largest).abs()
                if not (apart <= largest * 1.01 * 2.0**-8 + most_off).all():
                    return f"scale of the activation, expert {expert}"
            act = torch.minimum(torch.maximum(act, -448 * own), 448 * own)
            size = ((act.abs() * (1 + 2.0**-7) + off) / own.clamp_min(1e-300)).clamp_min(2.0**-6)
            allowed = own * torch.exp2(torch.floor(torch.log2(size)) - 4) + act.abs() * 2.0**-8 + off
        if not ((h[mine] - act).abs() <= allowed * (1 + 1e-6)).all():
            return f"activation, expert {expert}"
        second = reference.dequantise_weight(case.w2[expert].to(device), scales["w2_scale"][expert])
        read = reference._between(h[mine], quant, scales.get("act_scale")) if config.h_is_bf16 else h[mine]
        total.index_add_(0, tokens, read @ second.T * weights[tokens, slots].double()[:, None])
    total *= case.options.get("routed_scaling_factor", 1.0)
    if case.options.get("shared_output") is not None:
        total += case.options["shared_output"].to(device).double()
    overall, worst = error(result, total).relative_rms, float(relative_rms_rows(result, total).max())
    if overall <= SECOND and worst <= WORST:
        return ""
    return f"second GEMM: relative RMS {overall:.5f}, {worst:.5f} in a token"
