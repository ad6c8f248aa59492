"""Dynamic decode attention over paged KV caches, for NVIDIA Hopper GPUs; every operator also runs on CPU tensors.

``DecodePlan`` makes the task map of a step, ``decode`` attends by it, ``prefill`` attends new tokens over a cached
prefix, ``is_supported`` and ``why_not`` answer from the table in ``support``.
"""

from importlib.metadata import version

from .decode import decode
from .plan import DecodePlan
from .prefill import prefill
from .support import is_supported, why_not

__version__ = version("hpc-attention")
__all__ = ["DecodePlan", "__version__", "decode", "is_supported", "prefill", "why_not"]
