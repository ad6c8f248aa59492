"""SGLang's linear_bf16_fp32 for fp32 weights: x @ y.T in fp32, from a weight that others own."""

import hpc_router_gemm
import torch

from ..counters import count


def linear_bf16_fp32(x: torch.Tensor, y: torch.Tensor, terms: int, deterministic: bool) -> torch.Tensor:
    """Scores [M, N] fp32 of x [M, K] and an fp32 y [N, K].

    What hpc_router_gemm does not take is multiplied in fp32, and everything where the result must not depend on the
    batch: hpc_router_gemm.linear has no batch-invariant form.
    """
    takes = x.dtype == torch.bfloat16 and x.dim() == y.dim() == 2 and x.shape[1] % 8 == 0
    if not takes or deterministic:
        return torch.mm(x.float(), y.t())
    count("router.linear")
    return hpc_router_gemm.linear(_rows(x), _rows(y), terms)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with rows as hpc_router_gemm reads them: dense and a multiple of 16 bytes apart."""
    step = tensor.stride(0) * tensor.element_size()
    aligned = tensor.stride(1) == 1 and step % 16 == 0 and tensor.data_ptr() % 16 == 0
    return tensor if aligned else tensor.contiguous()
