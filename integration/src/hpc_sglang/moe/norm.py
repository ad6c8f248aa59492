"""The norm in front of a layer's gate and experts, which also quantises its rows as the experts want them.

SGLang's norm of a decode step ends before the gate's kernel starts, and hpc_moe then quantises what it wrote. Here one
kernel adds, norms and quantises, and lets the gate's kernel start so that this one's weight is on its way. A norm
module gets a forward of its own (``install``) that goes back to the module's for anything but a few rows in bf16.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..counters import count
from .experts import Experts

LAYERS = ("Qwen3MoeDecoderLayer",)  # of sglang.srt.models: post_attention_layernorm, then mlp.experts
MOST_ROWS = 128  # a decode step's; above, launches are a small part of a layer
GROUP = 128
_kernel = None


class Norm:
    """In place of one RMSNorm's ``forward``: (x, residual) as SGLang's, and quantised rows for ``experts``."""

    def __init__(self, module: Any, experts: Experts, original: Callable[..., Any]) -> None:
        self.module, self.experts, self.original = module, experts, original

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        self.experts.quantised = None
        given = any(value is not None for value in (*args, *kwargs.values()))
        if residual is None or given or not _takes(x, residual) or torch.compiler.is_compiling():
            return self.original(x, residual, *args, **kwargs)
        count("moe.norm")
        values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty((len(x), x.shape[1] // GROUP), dtype=torch.float32, device=x.device)
        run(x, residual, self.module.weight, self.module.variance_epsilon, values, scales)
        self.experts.quantised = (x, values, scales)
        return x, residual


def _takes(x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether ``run`` takes them: one to MOST_ROWS rows of bf16 on a GPU."""
    same = x.dim() == 2 and x.shape == residual.shape and x.dtype == residual.dtype == torch.bfloat16
    return same and x.is_cuda and 0 < len(x) <= MOST_ROWS and x.is_contiguous() and residual.is_contiguous()


def install(model: torch.nn.Module) -> int:
    """Take over the norms of ``model`` whose rows go to experts of ours in block FP8; how many there are."""
    placed = 0
    for layer in model.modules():
        known = any(base.__name__ in LAYERS for base in type(layer).__mro__)
        if not known or not type(layer).__module__.startswith("sglang.srt.models."):
            continue
        experts = getattr(getattr(layer.mlp, "experts", None), "hpc_experts", None)
        module = layer.post_attention_layernorm
        if experts is None or not _fits(module, experts):
            continue
        original = module.forward
        if isinstance(original, Norm):
            original = original.original
        module.forward = Norm(module, experts, original)
        placed += 1
    return placed


def _fits(module: Any, experts: Experts) -> bool:
    """Whether the module is a plain RMS norm in bf16 of rows that the experts take quantised by groups of 128."""
    hidden = experts.sizes()[1]
    return bool(
        experts.block
        and not experts.batch_invariant
        and type(module).__name__ == "RMSNorm"
        and module.weight.shape == (hidden,)
        and module.weight.dtype == torch.bfloat16
        and hidden % GROUP == 0
        and module.variance_size_override is None
        and not module.cast_x_before_out_mul
        and not module.fp32_residual
        and getattr(module, "_quant_linear", None) is None  # SGLang quantises for a projection (0.5.23)
    )


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
    pdl = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    hidden = x.shape[1]
    _get_kernel()[(len(x),)](
        x, residual, weight, values, scales, x.stride(0), residual.stride(0), epsilon,
        HIDDEN=hidden, GROUPS=1 << (hidden // GROUP - 1).bit_length(), PDL=pdl,
        num_warps=8 if hidden >= 2048 else 4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _get_kernel():  # noqa: ANN202, a triton kernel
    global _kernel
    if _kernel is None:
        from ._norm_kernel import add_norm_quantise

        _kernel = add_norm_quantise
    return _kernel
