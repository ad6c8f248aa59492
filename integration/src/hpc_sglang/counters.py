"""How often each of our operators was called in this process.

SGLang runs a model in its scheduler processes, so that is where these count. A call inside a CUDA graph counts when it
is captured, not when the graph is replayed.
"""

from collections import Counter

# "attention.decode", "attention.prefill", "attention.update", "router.gemm", "moe.block", "moe.tensor", ... -> calls
calls: Counter[str] = Counter()


def count(name: str) -> None:
    """One more call of ``name``."""
    calls[name] += 1


def reset() -> None:
    """Forget every call."""
    calls.clear()
