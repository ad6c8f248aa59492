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
    """Make ``hpc`` an attention backend of this process's SGLang, once SGLang imports its registry of them.

    Raises compat.Missing where there is no such registry, or no list of the names that flags take.
    """
    registry = compat.find_module("sglang.srt.layers.attention.attention_registry")
    for choices in compat.attention_choices():
        if NAME not in choices:
            choices.append(NAME)
    compat.when_imported(registry, lambda module: module.register_attention_backend(NAME)(_create))
    record.used(ATTENTION, f"backend '{NAME}' is registered; it runs with {FLAG} or --decode-attention-backend {NAME}")


def _create(runner: Any) -> Any:
    from .factory import create

    return create(runner)
