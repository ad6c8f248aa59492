"""Router GEMM: fp32-faithful expert scores from bf16 activations, and the choice of experts."""

from importlib.metadata import version

from .gemm import router_gemm
from .linear import linear
from .route import route
from .support import is_supported, why_not
from .weight import RouterWeight, split_terms

__version__ = version("hpc-router-gemm")
__all__ = ["RouterWeight", "__version__", "is_supported", "linear", "route", "router_gemm", "split_terms", "why_not"]
