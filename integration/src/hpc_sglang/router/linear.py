"""SGLang's linear_bf16_fp32 for fp32 weights: x @ y.T in fp32, from a weight that others own."""

from typing import Any

import hpc_router_gemm
import torch

from .. import compat
from ..counters import count


def linear_bf16_fp32(
    original: Any, x: torch.Tensor, y: torch.Tensor, terms: int | None, hpc_kernel_min_m: int | None = None
) -> torch.Tensor:
    """Scores [M, N] fp32 of x [M, K] and y [N, K].

    A bf16 ``y`` goes to SGLang's function, which then has nothing to lose. An fp32 one never does: its kernel of two
    terms keeps a split weight that no update reaches. Two terms where SGLang would use that kernel, else three, unless
    ``terms`` says otherwise; what hpc_router_gemm does not take is multiplied in fp32.
    """
    if y.dtype != torch.float32:
        return original(x, y, hpc_kernel_min_m=hpc_kernel_min_m)
    takes = x.dtype == torch.bfloat16 and x.dim() == y.dim() == 2 and x.shape[1] % 8 == 0
    # hpc_router_gemm.linear has no batch-invariant form.
    if not takes or compat.deterministic():
        return torch.mm(x.float(), y.t())
    if terms is None:
        terms = 2 if hpc_kernel_min_m is not None or compat.two_term_linear() else 3
    count("router.linear")
    return hpc_router_gemm.linear(_rows(x), _rows(y), terms)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with rows as hpc_router_gemm reads them: dense and a multiple of 16 bytes apart."""
    step = tensor.stride(0) * tensor.element_size()
    aligned = tensor.stride(1) == 1 and step % 16 == 0 and tensor.data_ptr() % 16 == 0
    return tensor if aligned else tensor.contiguous()
