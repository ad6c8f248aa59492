"""Attention backend ``hpc``: decode by hpc_attention, with a plan made once a step; prefill by it on a CPU.

    --attention-backend hpc            both; on a GPU prefill is the best installed backend's
    --decode-attention-backend hpc     beside any --prefill-attention-backend

``register`` makes the name known to SGLang. What a server cannot have is refused when its backend is made (``limits``).
"""

from typing import Any

from .. import compat
from ..record import ATTENTION, Record

NAME = "hpc"
FLAG = f"--attention-backend {NAME}"


def register(record: Record) -> None:
    """Make ``hpc`` an attention backend of this process's SGLang.

    Raises compat.Missing where SGLang has no registry of attention backends.
    """
    make_known(_create)
    record.used(ATTENTION, f"backend '{NAME}' is registered; it runs with {FLAG} or --decode-attention-backend {NAME}")


def refuse(reason: str) -> None:
    """Make ``hpc`` known as a backend that cannot be had here, so that asking for it says why instead of "unknown"."""

    def create(runner: Any) -> Any:
        raise ValueError(f"{FLAG}: {reason}")

    make_known(create)


def make_known(create: Any) -> None:
    """Register ``create(runner)`` under the name and let SGLang's flags take it."""
    compat.find("sglang.srt.layers.attention.attention_registry:register_attention_backend")(NAME)(create)
    for choices in compat.attention_choices():
        if NAME not in choices:
            choices.append(NAME)


def _create(runner: Any) -> Any:
    from .factory import create

    return create(runner)
