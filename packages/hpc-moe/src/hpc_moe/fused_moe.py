"""``fused_moe``: the public call and its registration with torch.library as ``hpc_moe::fused_moe``."""

import os
from dataclasses import dataclass

import torch
from hpc_common.capability import capability
from hpc_common.checks import check_aligned_16, fail

from . import _C, _checks
from .quant import Fp8Block, Fp8Tensor
from .support import require_supported
from .workspace import MoeWorkspace

_WHERE = _checks.WHERE


def fused_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    quant: Fp8Block | Fp8Tensor | None = None,
    ep_rank: int = 0,
    num_experts: int | None = None,
    activation: str = "silu",
    swiglu_limit: float | None = None,
    shared_output: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    batch_invariant: bool = False,
    workspace: MoeWorkspace | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate-up GEMM, SiLU-and-mul, down GEMM and weighted sum of the experts that each token chose.

    out[t] = routed_scaling_factor * sum over slots s of topk_weights[t, s] * y[t, s] + shared_output[t], where y[t, s]
    is w2[e] @ act rounded to bf16, act = silu(min(gate, L)) * clamp(up, -L, L), gate and up are the halves of
    w13[e] @ x[t], e is the expert of slot s and L is swiglu_limit. Only slots whose expert this rank owns count; the
    sum is made in slot order in fp32. With FP8, x and act (rounded to bf16 first) are quantised to e4m3; DESIGN.md
    gives the exact rounding.

    Args:
        x: [T, H] bf16, or e4m3 with FP8 weights; T 0 to 262,144, H a multiple of 128; row stride a multiple of 16
            bytes. Calls above 32,768 tokens run in chunks.
        w13: [E, 2I, H], gate rows first; w2: [E, H, I]; contiguous, e4m3, or bf16 with quant=None. E to 512, I a
            multiple of 64, both of this rank.
        topk_ids: [T, k] int32 or int64, any strides, k 1 to 32: global expert ids. This rank owns
            [ep_rank * E, (ep_rank + 1) * E); other ids and -1 are skipped with their weights, NaN or not. An expert
            may come twice in a row.
        topk_weights: [T, k] fp32, any strides.
        quant: Fp8Block, Fp8Tensor, or None for bf16 weights.
        ep_rank, num_experts: this rank, and the number of experts over all ranks (None: E, on a single rank).
        activation: "silu".
        swiglu_limit: L, positive; None: no limit.
        shared_output: [T, H] bf16, added once (pass it on one rank only).
        batch_invariant: a token's row depends on nothing but itself, whatever shares its batch.
        workspace: a MoeWorkspace or a uint8 tensor of at least ``workspace_bytes``; None: allocated by the call. Its
            contents don't matter before the call and mean nothing after.
        out: [T, H] bf16 to write to, rows apart; must not overlap another argument.

    Returns out [T, H] bf16. The result is bit-identical from run to run, and a row of y is the same on every rank. No
    gradient: the result does not require one, whatever the arguments do.

    Raises TypeError or ValueError, naming the argument, before anything runs: wrong dtype, shape, stride, device, a
    workspace too small, a device without a kernel. Ids outside [-1, num_experts) are an error on the CPU, and on a GPU
    with HPC_DEBUG=1 outside a capture; else they are skipped.
    """
    name = _checks.check_quant(quant)
    experts, hidden, intermediate = _checks.check_weights(x, w13, w2, name)
    _checks.check_routing(x, topk_ids, topk_weights)
    _checks.check_scales(x, experts, hidden, intermediate, quant)
    num_experts = _checks.check_ranks(ep_rank, num_experts, experts)
    if not isinstance(activation, str) or activation != "silu":
        fail(_WHERE, "activation", '"silu"', repr(activation))
    if swiglu_limit is not None:
        swiglu_limit = _checks.check_number("swiglu_limit", swiglu_limit, positive=True)
    factor = _checks.check_number("routed_scaling_factor", routed_scaling_factor, positive=False)
    if not isinstance(batch_invariant, bool):
        fail(_WHERE, "batch_invariant", "a bool", type(batch_invariant).__name__, TypeError)
    for argument, tensor in (("shared_output", shared_output), ("out", out)):
        if tensor is not None:
            _checks.check_output(argument, tensor, x)
    if out is not None:
        _checks.check_rows_apart("out", out)
    buffer = _checks.workspace_buffer(workspace)
    w13_scale = None if quant is None else quant.w13_scale
    w2_scale = None if quant is None else quant.w2_scale
    x_scale = None if quant is None else quant.x_scale
    act_scale = quant.act_scale if isinstance(quant, Fp8Tensor) else None
    others = {
        "w13": w13,
        "w2": w2,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
        "quant.w13_scale": w13_scale,
        "quant.w2_scale": w2_scale,
        "quant.x_scale": x_scale,
        "quant.act_scale": act_scale,
        "shared_output": shared_output,
        "workspace": buffer,
        "out": out,
    }
    _checks.check_devices(x, others)
    if not torch.compiler.is_compiling():  # a device's properties cannot be traced; the op asks again when it runs
        require_supported(_WHERE, name, x.dtype, x.device)

    if out is None:
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    torch.ops.hpc_moe.fused_moe(
        x,
        w13,
        w2,
        topk_ids,
        topk_weights,
        w13_scale,
        w2_scale,
        x_scale,
        act_scale,
        name,
        ep_rank,
        num_experts,
        swiglu_limit,
        shared_output,
        factor,
        batch_invariant,
        buffer,
        out,
    )
    return out


@dataclass(frozen=True)
class Call:
    """One checked call, as the CPU and the CUDA implementation get it. Tensors as in ``fused_moe``.

    config: the Config everything is sized by (csrc/config/config.hpp). workspace: uint8, at least config.layout.bytes.
    """

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    x_scale: torch.Tensor | None
    act_scale: torch.Tensor | None
    quant: str
    ep_rank: int
    num_experts: int
    swiglu_limit: float | None
    shared_output: torch.Tensor | None
    routed_scaling_factor: float
    batch_invariant: bool
    workspace: torch.Tensor
    out: torch.Tensor
    config: _C.Config


def _prepare(*args: object) -> Call | None:
    """The op's arguments as a Call, with the Config and a workspace that is large enough; None without tokens."""
    names = [name for name in Call.__dataclass_fields__ if name != "config"]
    values = dict(zip(names, args, strict=True))
    x, workspace = values["x"], values["workspace"]
    config = _C.make_config(
        num_tokens=x.shape[0],
        top_k=values["topk_ids"].shape[1],
        num_local_experts=values["w13"].shape[0],
        num_experts=values["num_experts"],
        hidden=x.shape[1],
        intermediate=values["w2"].shape[2],
        quant=values["quant"],
        x_is_bf16=x.dtype == torch.bfloat16,
        batch_invariant=values["batch_invariant"],
        num_sms=capability(x.device).num_sms,
    )
    if workspace is not None and workspace.numel() < config.layout.bytes:
        fail(_WHERE, "workspace", f"at least {config.layout.bytes} bytes", workspace.numel())
    if x.shape[0] == 0:
        return None
    if workspace is None:
        values["workspace"] = x.new_empty(config.layout.bytes, dtype=torch.uint8)
    for name in ("x", "w13", "w2", "shared_output", "workspace", "out"):
        if values[name] is not None:
            check_aligned_16(_WHERE, name, values[name])
    return Call(**values, config=config)


@torch.no_grad()
def _run_cpu(*args: object) -> None:
    call = _prepare(*args)
    if call is not None:
        from . import _cpu

        _checks.check_ids(call.topk_ids, call.num_experts)
        _cpu.run(call)


@torch.no_grad()
def _run_cuda(x: torch.Tensor, *args: object) -> None:
    # Here again, for those who call torch.ops.hpc_moe.fused_moe themselves: never a launch without a kernel.
    require_supported(_WHERE, str(args[8]), x.dtype, x.device)
    call = _prepare(x, *args)
    if call is not None:
        if os.environ.get("HPC_DEBUG") == "1" and not torch.cuda.is_current_stream_capturing():
            _checks.check_ids(call.topk_ids, call.num_experts)
        from . import _cuda

        _cuda.run(call)


def _fake(*args: object) -> None:
    """Writes workspace and out; makes nothing."""


_SCHEMA = (
    "fused_moe(Tensor x, Tensor w13, Tensor w2, Tensor topk_ids, Tensor topk_weights, Tensor? w13_scale, "
    "Tensor? w2_scale, Tensor? x_scale, Tensor? act_scale, str quant, int ep_rank, int num_experts, "
    "float? swiglu_limit, Tensor? shared_output, float routed_scaling_factor, bool batch_invariant, "
    "Tensor(a!)? workspace, Tensor(b!) out) -> ()"
)
_library = torch.library.Library("hpc_moe", "DEF")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("fused_moe", _run_cpu, "CPU")
_library.impl("fused_moe", _run_cuda, "CUDA")
torch.library.register_fake("hpc_moe::fused_moe", _fake, lib=_library)
