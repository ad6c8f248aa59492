"""Workspace of ``fused_moe``: sized by a query, owned by the caller, never cleared."""

import torch
from hpc_common.capability import as_device
from hpc_common.checks import check_int, fail

from . import _C
from .support import check_x_dtype

_WHERE = "hpc_moe.workspace_bytes"
_MAX_DIM = 2**17  # of H and I; csrc/config/config.hpp


def workspace_bytes(
    max_tokens: int,
    top_k: int,
    num_local_experts: int,
    hidden: int,
    intermediate: int,
    quant: str = "block",
    num_experts: int | None = None,
    x_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> int:
    """Bytes that every call of at most ``max_tokens`` tokens with these sizes finds enough.

    Above 32,768 tokens a call runs in chunks, so the size stops growing there.

    Args:
        max_tokens: 0 to 262,144. top_k: 1 to 32. num_local_experts: E, 1 to 512.
        hidden: H, a multiple of 128. intermediate: I on this rank, a multiple of 64. Both to 131,072.
        quant: "none" (bf16 weights), "block" or "tensor".
        num_experts: over all ranks; None: E.
        x_dtype: torch.bfloat16 or torch.float8_e4m3fn (not with "none").
        batch_invariant: as passed to the calls.

    Raises ValueError for a value out of range or an x_dtype that ``quant`` does not take, TypeError for a wrong type.
    """
    check_int(_WHERE, "max_tokens", max_tokens, 0, 262144)
    check_int(_WHERE, "top_k", top_k, 1, 32)
    check_int(_WHERE, "num_local_experts", num_local_experts, 1, 512)
    if num_experts is not None:
        check_int(_WHERE, "num_experts", num_experts, num_local_experts, 2**16)
    for name, size, multiple in (("hidden", hidden, 128), ("intermediate", intermediate, 64)):
        if check_int(_WHERE, name, size, multiple, _MAX_DIM) % multiple:
            fail(_WHERE, name, f"a multiple of {multiple}", size)
    check_x_dtype(_WHERE, quant, x_dtype)
    if not isinstance(batch_invariant, bool):
        fail(_WHERE, "batch_invariant", "a bool", f"{type(batch_invariant).__name__} {batch_invariant!r}", TypeError)
    return _C.max_workspace_bytes(
        num_tokens=max_tokens,
        top_k=top_k,
        num_local_experts=num_local_experts,
        num_experts=num_local_experts if num_experts is None else num_experts,
        hidden=hidden,
        intermediate=intermediate,
        quant=quant,
        x_is_bf16=x_dtype == torch.bfloat16,
        batch_invariant=batch_invariant,
    )


class MoeWorkspace:
    """Memory for calls of at most ``max_tokens`` tokens; one serves any number of layers, one stream at a time.

    Takes the arguments of ``workspace_bytes`` and a device (None: the current GPU where there is one, else the CPU).
    What the memory holds between calls doesn't matter. A call that needs more, or is on another device,
    raises ValueError.

    Attributes:
        buffer: uint8 [nbytes] on ``device``.
    """

    def __init__(
        self,
        max_tokens: int,
        top_k: int,
        num_local_experts: int,
        hidden: int,
        intermediate: int,
        quant: str = "block",
        num_experts: int | None = None,
        x_dtype: torch.dtype = torch.bfloat16,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        nbytes = workspace_bytes(
            max_tokens, top_k, num_local_experts, hidden, intermediate, quant, num_experts, x_dtype, batch_invariant
        )
        device = as_device("hpc_moe.MoeWorkspace", device)
        with torch.inference_mode(False):  # memory made in inference mode could not be written outside it
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.numel()
