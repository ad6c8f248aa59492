"""How often each of our operators was called in this process, and the memory that this package holds for them.

SGLang runs a model in its scheduler processes, so that is where these count. A call inside a CUDA graph counts when it
is captured, not when the graph is replayed; a call that torch.compile traces does not count.
"""

from collections import Counter

import torch

# "attention.decode", "router.gemm", "router.linear", "moe.block", "moe.tensor", ... -> calls
calls: Counter[str] = Counter()
# "attention.plans", "attention.tables", "moe.workspace" -> bytes made since the process began
made_bytes: Counter[str] = Counter()


def count(name: str) -> None:
    """One more call of ``name``."""
    if not torch.compiler.is_compiling():  # a counter in a trace would be a guard that fails at the next call
        calls[name] += 1


def made(name: str, size: int) -> None:
    """``size`` more bytes are held for ``name``."""
    made_bytes[name] += size


def reset() -> None:
    """Forget every call; memory is still held."""
    calls.clear()
