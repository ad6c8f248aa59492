"""Workspace of ``fused_moe``: sized by a query, owned by the caller, never cleared."""

import torch
from hpc_common.checks import check_int, fail

from . import _C

_WHERE = "hpc_moe.workspace_bytes"


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
        hidden: H, a multiple of 128. intermediate: I on this rank, a multiple of 64.
        quant: "none" (bf16 weights), "block" or "tensor".
        num_experts: over all ranks; None: E.
        x_dtype: torch.bfloat16 or torch.float8_e4m3fn.
        batch_invariant: as passed to the calls.

    Raises ValueError for a size out of range, TypeError for a wrong type.
    """
    check_int(_WHERE, "max_tokens", max_tokens, 0, 262144)
    if quant not in ("none", "block", "tensor"):
        fail(_WHERE, "quant", "none, block or tensor", repr(quant))
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

    Takes the arguments of ``workspace_bytes`` and a device. What the memory holds between calls doesn't matter.
    A call that needs more, or is on another device, raises ValueError.

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
        device: torch.device | str = "cpu",
    ) -> None:
        nbytes = workspace_bytes(
            max_tokens, top_k, num_local_experts, hidden, intermediate, quant, num_experts, x_dtype, batch_invariant
        )
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.numel()
