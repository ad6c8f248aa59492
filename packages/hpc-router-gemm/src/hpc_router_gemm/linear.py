"""Scores from a plain weight tensor: nothing is prepared, nothing is kept."""

import torch

from . import _cpu
from ._checks import check_memory, check_strides_16, check_terms, check_weight, check_x

_WHERE = "hpc_router_gemm.linear"
_OP = "hpc_router_gemm::linear"

torch.library.define(
    _OP, "(Tensor x, Tensor weight, int terms, Tensor(a!) out) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.impl(_OP, "cpu")
@torch.no_grad()
def _linear_cpu(x: torch.Tensor, weight: torch.Tensor, terms: int, out: torch.Tensor) -> None:
    check_memory(_WHERE, "linear", x, weight)
    _cpu.scores(x, weight, terms, out)


@torch.library.impl(_OP, "cuda")
@torch.no_grad()
def _linear_cuda(x: torch.Tensor, weight: torch.Tensor, terms: int, out: torch.Tensor) -> None:
    check_memory(_WHERE, "linear", x, weight)
    from . import _cuda

    if x.shape[0]:
        _cuda.linear(x, weight, terms, out)


@torch.library.register_fake(_OP)
def _linear_fake(x, weight, terms, out) -> None:
    return None


def linear(x: torch.Tensor, weight: torch.Tensor, terms: int = 3) -> torch.Tensor:
    """Scores x @ weight.T in fp32, reading ``weight`` as it is in this call.

    For a weight that others own and change: no copy, no cache, nothing that could be stale.

    Args:
        x: [M, K] bf16, M from 0; rows dense, 16-byte aligned and a multiple of 16 bytes apart.
        weight: [N, K] fp32 or bf16, N from 1, K a multiple of 8, on the same device; rows as x's.
        terms: bf16 terms of an fp32 weight, 1 to 3 (a bf16 weight is one).

    Returns: [M, N] fp32, with router_gemm's error bounds and guarantees. A device may use another algorithm in another
    band of M, so that a row's bits differ between bands. Bands on a CPU: one, every M; on a GPU: the M that share a
    ``_C.choose_config(m=..., n=..., k=..., terms=...)``'s kernel, split and k_groups (or a tuned Config's), and those
    in which cuBLAS fp32 was measured to be faster, where it computes an fp32 weight's scores with its own guarantees.
    ``hpc_router_gemm.tuned`` has these bands, dated; no size that was measured on an H200 has one. No gradient.

    Raises TypeError for wrong types and dtypes; ValueError for wrong shapes, strides, devices, or a device that cannot
    run this.
    """
    check_weight(_WHERE, "weight", weight)
    check_strides_16(_WHERE, "weight", weight)
    check_x(_WHERE, x, weight)
    terms = check_terms(_WHERE, terms) if weight.dtype == torch.float32 else min(check_terms(_WHERE, terms), 1)
    out = x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
    torch.ops.hpc_router_gemm.linear(x, weight, terms, out)
    return out
