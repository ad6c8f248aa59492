"""Router scores: bf16 activations times a fp32 weight, as a sum of bf16 products."""

import torch
from hpc_common.checks import fail

from . import _cpu
from ._checks import check_flag, check_memory, check_out, check_x
from .weight import RouterWeight

_WHERE = "hpc_router_gemm.router_gemm"
_OP = "hpc_router_gemm::router_gemm"

# split: RouterWeight.split, for kernels that read it rather than the weight.
# weight_updated: the weight may have been written by the work just before this call (RouterWeight.updated), so a
# kernel must not load it ahead of its predecessor's end.
torch.library.define(
    _OP,
    "(Tensor x, Tensor weight, Tensor? split, int terms, bool batch_invariant, bool weight_updated, Tensor(a!) out)"
    " -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_OP, "cpu")
@torch.no_grad()
def _router_gemm_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    split: torch.Tensor | None,
    terms: int,
    batch_invariant: bool,  # always so on a CPU
    weight_updated: bool,
    out: torch.Tensor,
) -> None:
    check_memory(_WHERE, "router_gemm", x, weight)
    _cpu.scores(x, weight, terms, out)


@torch.library.impl(_OP, "cuda")
@torch.no_grad()
def _router_gemm_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    split: torch.Tensor | None,
    terms: int,
    batch_invariant: bool,
    weight_updated: bool,
    out: torch.Tensor,
) -> None:
    check_memory(_WHERE, "router_gemm", x, weight)
    from . import _cuda

    if x.shape[0]:
        _cuda.router_gemm(x, weight, split, terms, batch_invariant, weight_updated, out)


@torch.library.register_fake(_OP)
def _router_gemm_fake(x, weight, split, terms, batch_invariant, weight_updated, out) -> None:
    return None


def check_router_weight(where: str, w: object) -> RouterWeight:
    """``w`` as a RouterWeight, else TypeError."""
    if not isinstance(w, RouterWeight):
        fail(where, "w", "a RouterWeight (hpc_router_gemm.linear takes a tensor)", type(w).__name__, TypeError)
    return w


def router_gemm(
    x: torch.Tensor, w: RouterWeight, out: torch.Tensor | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """Scores x @ weight.T in fp32.

    Args:
        x: [M, K] bf16, M from 0; rows dense, 16-byte aligned and a multiple of 16 bytes apart.
        w: RouterWeight of [N, K] on the same device.
        out: [M, N] fp32, contiguous, written and returned; None allocates it.
        batch_invariant: the scores of a row of x then don't depend on M or on the other rows. Always so on a CPU.

    Returns: [M, N] fp32. Equal weight rows give bit-equal scores, and the same call gives the same bits.
    A NaN or Inf in one row of x stays in that row of the result; one in a weight row stays in that column.

    Error, with s the exact error of the split and f = 2^-23 * sqrt(K) * rms(x) * rms(weight row): terms=2 has rms at
    most 1.15 rms(s) + f and largest at most 1.5 max|s| + 6 f; terms=3 at most a fp32 matmul's.

    No gradient: the result does not require one, whatever the arguments do.

    The split into bf16 terms follows Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while
    surpassing the FP32 theoretical peak performance" (2022), with rounding in place of scaling.

    Raises TypeError for wrong types and dtypes; ValueError for wrong shapes, strides, devices, or a device that cannot
    run this.
    """
    check_router_weight(_WHERE, w)
    check_x(_WHERE, x, w.weight)
    check_flag(_WHERE, "batch_invariant", batch_invariant)
    if out is None:
        out = x.new_empty((x.shape[0], w.weight.shape[0]), dtype=torch.float32)
    else:
        check_out(_WHERE, out, x, w.weight.shape[0])
    torch.ops.hpc_router_gemm.router_gemm(x, w.weight, w.split, w.terms, batch_invariant, w.take_updated(), out)
    return out
