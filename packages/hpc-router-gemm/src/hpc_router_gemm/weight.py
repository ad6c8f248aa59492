"""The router's weight, and its split into bf16 terms."""

import torch
from hpc_common.checks import check_dtype, check_same_device, check_shape, check_tensor

from ._checks import check_terms, check_weight

BF16_MAX = torch.finfo(torch.bfloat16).max
_CHUNK = 64  # of K, of three terms in memory: a stage of the kernels


def split_terms(weight: torch.Tensor, terms: int) -> list[torch.Tensor]:
    """``weight`` as a sum of ``terms`` bf16 tensors of its shape, largest first.

    The first is the weight rounded to the nearest bf16, each further one the exact fp32 residual rounded likewise.
    bf16 has fp32's exponent range, so residuals need no scale; three terms hold all 24 bits of a weight of at least
    2^-110. A finite weight that would round to infinity saturates at the largest finite bf16 and the residual carries
    the rest. An infinite or NaN weight is its own first term and zero in the others, so that scores come out as they
    would of fp32 arithmetic.
    """
    if weight.dtype == torch.bfloat16:
        return [weight]
    finite = weight.isfinite()
    missing = weight
    result = []
    for _ in range(terms):
        term = torch.where(finite, missing.clamp(-BF16_MAX, BF16_MAX), missing).to(torch.bfloat16)
        result.append(term)
        missing = torch.where(finite, missing - term.float(), 0.0)
    return result


class RouterWeight:
    """A router's weight [N, K] in the form the operators read. It owns its memory; nothing derived is kept elsewhere.

    Attributes:
        weight: contiguous fp32 or bf16 [N, K], a copy of what was given. Its address never changes, so ``update_``
            reaches CUDA graphs captured before it. Write to it through ``update_`` only.
        terms: bf16 terms a score is summed over: 1 to 3 for an fp32 weight, always 1 for a bf16 one.
        split: the terms, bf16, for kernels that read them rather than fp32: of two [2, N, K], of three in chunks of 64
            of K, [ceil(K / 64), 3, N, 64], zeros behind K. An fp32 weight on a GPU has it from the start for two or
            three terms; else None unless ``presplit`` was called. ``update_`` writes it too.
        updated: host flag, set by construction and ``update_``, cleared by the next call that uses the weight. A
            kernel launched with PDL may load weights before it waits for its predecessor, except where that
            predecessor may be the update: the call that finds the flag set waits first.
    """

    def __init__(self, weight: torch.Tensor, terms: int = 2) -> None:
        """Copy ``weight`` [N, K], fp32 or bf16 with any strides; N >= 1, K a multiple of 8.

        Raises TypeError for another dtype, ValueError for another shape or for terms outside 1 to 3.
        """
        where = "hpc_router_gemm.RouterWeight"
        check_weight(where, "weight", weight)
        check_terms(where, terms)
        # What is made in inference mode can't be written outside it; leaving that mode records gradients again.
        with torch.inference_mode(False), torch.no_grad():
            self.weight = weight.new_empty(weight.shape).copy_(weight)
        self.terms = terms if weight.dtype == torch.float32 else 1
        self.updated = True
        self.split: torch.Tensor | None = None
        if self.weight.is_cuda and self.terms > 1:
            self.presplit()

    @property
    def num_experts(self) -> int:
        """N."""
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """K."""
        return self.weight.shape[1]

    def update_(self, new: torch.Tensor) -> "RouterWeight":
        """Copy ``new`` (shape, dtype and device of the weight) into the memory the operators read; returns self.

        Runs on the current stream and can be captured; where there is a ``split``, it takes scratch of its size.
        Raises TypeError for another dtype, ValueError for another shape or device.
        """
        where = "hpc_router_gemm.RouterWeight.update_"
        check_tensor(where, "new", new)
        check_dtype(where, "new", new, (self.weight.dtype,))
        check_shape(where, "new", new, tuple(self.weight.shape))
        check_same_device(where, "new", new, self.weight.device, "weight")
        with torch.no_grad():
            self.weight.copy_(new)
            if self.split is not None:
                self._fill_split(self.split)
        self.updated = True
        return self

    def presplit(self) -> torch.Tensor:
        """``split``, made now where there was none."""
        if self.split is None:
            with torch.inference_mode(False), torch.no_grad():
                n, k = self.weight.shape
                shape = (-(-k // _CHUNK), 3, n, _CHUNK) if self.terms == 3 else (self.terms, n, k)
                self.split = self.weight.new_zeros(shape, dtype=torch.bfloat16)
                self._fill_split(self.split)
        return self.split

    def _fill_split(self, target: torch.Tensor) -> None:
        terms = split_terms(self.weight, self.terms)
        if self.terms != 3:
            for destination, term in zip(target, terms, strict=True):
                destination.copy_(term)
            return
        whole, rest = divmod(self.weight.shape[1], _CHUNK)
        for destination, term in zip(target.unbind(1), terms, strict=True):
            if whole:
                destination[:whole].copy_(term[:, : whole * _CHUNK].unflatten(1, (whole, _CHUNK)).transpose(0, 1))
            if rest:
                destination[whole, :, :rest].copy_(term[:, whole * _CHUNK :])

    def take_updated(self) -> bool:
        """Return ``updated`` and clear it. Called by the operators, once a call."""
        updated = self.updated
        if updated:  # written only where it changes: torch.compile then sees no side effect in the common case
            self.updated = False
        return updated

    def __repr__(self) -> str:
        name = str(self.weight.dtype).removeprefix("torch.")
        return f"RouterWeight({list(self.weight.shape)} {name}, terms={self.terms}, device={self.weight.device})"
