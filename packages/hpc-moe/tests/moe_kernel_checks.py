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
    if case.quant is None or config.regime == "low" or config.num_chunks != 1:
        assert overall <= OVERALL and worst <= WORST, text
        return
    assert overall <= LOOSE and worst <= LOOSE_WORST, text
    halves(case, config)


def halves(case: Any, config: Any) -> None:
    """Run the call of ``case`` and compare the activation and the output, each with what it was made from."""
    space = torch.full((config.layout.bytes,), 255, dtype=torch.uint8, device=case.x.device)
    result = case.run(workspace=space)
    space = space.cpu()
    quant = hpc_moe.quant.quant_name(case.quant)
    inter, block, rows = case.w2.shape[2], config.act_group, config.chunk_rows
    scales = {name: value.cpu() for name, value in vars(case.quant).items() if value is not None}

    def view(offset: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return space[offset : offset + rows * width * dtype.itemsize].view(dtype).view(rows, width).double()

    h = view(config.layout.h, inter, torch.float8_e4m3fn)
    if quant == "block":
        scale = view(config.layout.h_scale, inter // block, torch.float32).repeat_interleave(block, 1)
    else:
        scale = scales["act_scale"].double().expand(rows, inter)
    wide = reference._input(case.x.cpu(), quant, scales.get("x_scale"))
    ids, weights = case.topk_ids.cpu(), case.topk_weights.cpu()
    limit, rank = case.options.get("swiglu_limit"), case.options.get("ep_rank", 0)
    experts = case.w13.shape[0]
    total = torch.zeros(wide.shape, dtype=torch.float64)
    begin = 0
    for expert in range(experts):
        tokens, slots = (ids == rank * experts + expert).nonzero(as_tuple=True)
        mine = slice(begin, begin + len(tokens))
        begin += len(tokens)
        if not len(tokens):
            continue
        first = reference.dequantise_weight(case.w13[expert].cpu(), scales["w13_scale"][expert])
        gate, up = (wide[tokens] @ first.T).chunk(2, 1)
        # 132 truncations of at most 2^-13 of the largest product in each sum of 128, in rms 2^-10.3 of it: five such.
        off = (wide[tokens].square() @ first.square().T).sqrt() * 2.0**-8
        off_gate, off_up = off.chunk(2, 1)
        act = reference.activation(gate, up, limit)
        up = up if limit is None else up.clamp(-limit, limit)
        off = 1.1 * (up.abs() + off_up) * off_gate + (gate * torch.sigmoid(gate)).abs() * off_up
        own = scale[mine]
        if quant == "block":
            largest, most_off = (each.view(len(tokens), -1, block).amax(2) for each in (act.abs(), off))
            apart = (own[:, ::block] * 448 - largest).abs()
            assert (apart <= largest * 1.01 * 2.0**-8 + most_off).all(), f"scale of the activation, expert {expert}"
        act = torch.minimum(torch.maximum(act, -448 * own), 448 * own)
        size = ((act.abs() * (1 + 2.0**-7) + off) / own.clamp_min(1e-300)).clamp_min(2.0**-6)
        allowed = own * torch.exp2(torch.floor(torch.log2(size)) - 4) + act.abs() * 2.0**-8 + off
        assert ((h[mine] * own - act).abs() <= allowed * (1 + 1e-6)).all(), f"activation, expert {expert}"
        second = reference.dequantise_weight(case.w2[expert].cpu(), scales["w2_scale"][expert])
        total.index_add_(0, tokens, (h[mine] * own) @ second.T * weights[tokens, slots].double()[:, None])
    total *= case.options.get("routed_scaling_factor", 1.0)
    if case.options.get("shared_output") is not None:
        total += case.options["shared_output"].cpu().double()
    rows_off = relative_rms_rows(result, total)
    overall, worst = error(result, total).relative_rms, float(rows_off.max())
    assert overall <= SECOND and worst <= WORST, f"second GEMM: relative RMS {overall:.5f}, {worst:.5f} in a token"
