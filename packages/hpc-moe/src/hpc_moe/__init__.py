"""Fused mixture of experts (FP8 by block, FP8 per tensor, bf16) for NVIDIA Hopper GPUs, and on a CPU.

``fused_moe`` is the operator. README.md shows a call, DESIGN.md gives the exact mathematics and the pipeline.
"""

from importlib.metadata import version

from .fused_moe import fused_moe
from .quant import Fp8Block, Fp8Tensor, quantize_groups, quantize_static, quantize_weight
from .support import is_supported, why_not
from .workspace import MoeWorkspace, workspace_bytes

__version__ = version("hpc-moe")
__all__ = [
    "Fp8Block",
    "Fp8Tensor",
    "MoeWorkspace",
    "fused_moe",
    "is_supported",
    "quantize_groups",
    "quantize_static",
    "quantize_weight",
    "why_not",
    "workspace_bytes",
]
