"""The two norms of a layer, which also quantise their rows for what comes next: experts, or a block FP8 projection.

SGLang's norm of a decode step ends before the next kernel starts, and another kernel then quantises what it wrote. Here
one kernel adds, norms and quantises, and lets the next one start: the gate's, whose weight is then on its way. A norm
module gets a forward of its own (``install``) that goes back to the module's for anything but a few rows in bf16.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..counters import count
from ..early import early_start
from . import rows

# Of sglang.srt.models: input_layernorm, then self_attn.qkv_proj; post_attention_layernorm, then mlp.experts.
LAYERS = ("Qwen3MoeDecoderLayer",)
LINEAR = "triton_w8a8_block_fp8_linear"  # SGLang's function for projections that reads row-major scales
MOST_ROWS = 128  # a decode step's; above, launches are a small part of a layer
GROUP = 128


class Norm:
    """In place of one RMSNorm's ``forward``: (x, residual) as SGLang's, and quantised rows put into ``sink``."""

    def __init__(self, module: Any, sink: rows.Rows, original: Callable[..., Any]) -> None:
        self.module, self.sink, self.original = module, sink, original

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        self.sink.forget()
        rows.linear.forget()
        given = any(value is not None for value in (*args, *kwargs.values()))
        if residual is None or given or not _takes(x, residual) or torch.compiler.is_compiling():
            return self.original(x, residual, *args, **kwargs)
        count("moe.norm")
        values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty((len(x), x.shape[1] // GROUP), dtype=torch.float32, device=x.device)
        run(x, residual, self.module.weight, self.module.variance_epsilon, values, scales)
        self.sink.put(x, values, scales)
        return x, residual


def quantise(original: Any, x: torch.Tensor, group_size: int, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's per_token_group_quant_fp8: what a norm made of x, where rows and groups are as that made them."""
    if torch.compiler.is_compiling() or group_size != GROUP or args or any(kwargs.values()):
        return original(x, group_size, *args, **kwargs)
    made = rows.linear.take(x)
    if made is None:
        return original(x, group_size, *args, **kwargs)
    count("moe.quantised_linear")
    return made


def _takes(x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether ``run`` takes them: one to MOST_ROWS rows of bf16 on a GPU."""
    same = x.dim() == 2 and x.shape == residual.shape and x.dtype == residual.dtype == torch.bfloat16
    return same and x.is_cuda and 0 < len(x) <= MOST_ROWS and x.is_contiguous() and residual.is_contiguous()


def install(model: torch.nn.Module, linear: bool) -> tuple[int, int]:
    """Take over the norms of ``model``'s layers with experts of ours in block FP8.

    linear: those in front of QKV projections too; ``quantise`` is hooked.

    Returns how many there are in front of experts and of projections.
    """
    experts_, projections = 0, 0
    for layer in model.modules():
        known = any(base.__name__ in LAYERS for base in type(layer).__mro__)
        if not known or not type(layer).__module__.startswith("sglang.srt.models."):
            continue
        experts = getattr(getattr(layer.mlp, "experts", None), "hpc_experts", None)
        if experts is None or not experts.block or experts.batch_invariant:
            continue
        hidden = experts.sizes()[1]
        experts_ += _place(layer.post_attention_layernorm, hidden, experts.rows)
        if linear and _projects(layer.self_attn.qkv_proj):
            projections += _place(layer.input_layernorm, hidden, rows.linear)
    return experts_, projections


def _place(module: Any, hidden: int, sink: rows.Rows) -> bool:
    """Take ``module`` over where it is a plain RMS norm in bf16 of ``hidden`` columns in groups of 128."""
    fits = (
        type(module).__name__ == "RMSNorm"
        and module.weight.shape == (hidden,)
        and module.weight.dtype == torch.bfloat16
        and hidden % GROUP == 0
        and module.variance_size_override is None
        and not module.cast_x_before_out_mul
        and not module.fp32_residual
        and getattr(module, "_quant_linear", None) is None  # SGLang quantises for a projection (0.5.23)
    )
    if fits:
        original = module.forward
        module.forward = Norm(module, sink, original.original if isinstance(original, Norm) else original)
    return fits


def _projects(projection: Any) -> bool:
    """Whether a projection quantises its input by SGLang's function that ``quantise`` is around."""
    method = getattr(projection, "quant_method", None)
    function = getattr(method, "w8a8_block_fp8_linear", None)
    function = getattr(function, "func", function)  # later versions bind arguments
    blocks = getattr(getattr(method, "quant_config", None), "weight_block_size", None)
    return getattr(function, "__name__", "") == LINEAR and list(blocks or ()) == [GROUP, GROUP]


def run(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    values: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """residual += x; x = RMS norm of that sum, unrounded, times weight; x quantised as hpc_moe.quantize_groups does.

    Args:
        x, residual: [T, H] bf16, dense rows, H a multiple of 128; both are written. weight: [H] bf16.
        epsilon: added to the mean square. values: [T, H] e4m3, out. scales: [T, H / 128] fp32, out; contiguous.
    """
    pdl = early_start(x.device)
    hidden = x.shape[1]
    _get_kernel()[(len(x),)](
        x, residual, weight, values, scales, x.stride(0), residual.stride(0), epsilon,
        HIDDEN=hidden, GROUPS=1 << (hidden // GROUP - 1).bit_length(), PDL=pdl,
        num_warps=8 if hidden >= 2048 else 4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@functools.cache
def _get_kernel():  # noqa: ANN202, a triton kernel
    from ._norm_kernel import add_norm_quantise

    return add_norm_quantise
