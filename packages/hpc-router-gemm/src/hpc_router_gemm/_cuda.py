"""The operators on a Hopper GPU: tensors to raw addresses, then the kernels of the extension module."""

import torch

from . import _C, tuned


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def scores(
    x: torch.Tensor,
    weight: torch.Tensor,
    split: torch.Tensor | None,
    terms: int,
    batch_invariant: bool,
    prefetch: bool,
    out: torch.Tensor,
    config: "_C.Config | None" = None,
) -> None:
    """x [M, K] bf16 times weight [N, K] (fp32 or bf16) transposed to out [M, N] fp32, M >= 1.

    split: RouterWeight.split of that weight and number of terms: a kernel may read it rather than the weight.
    prefetch: the weight is not written by the work just before, so it may be read before that has ended.
    config: replaces the chosen Config, for tuning and tests.
    """
    if config is None and not batch_invariant and weight.dtype == torch.float32:
        config = tuned.config_of(x.device, x.shape[0], weight.shape[0], x.shape[1], terms, split is not None)
    _C.router_gemm(
        x.data_ptr(),
        weight.data_ptr(),
        0 if split is None else split.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        weight.dtype == torch.bfloat16,
        terms,
        batch_invariant,
        prefetch,
        x.device.index,
        _stream(x.device),
        config,
    )


def router_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    split: torch.Tensor | None,
    terms: int,
    batch_invariant: bool,
    weight_updated: bool,
    out: torch.Tensor,
    config: "_C.Config | None" = None,
) -> None:
    """Scores with a RouterWeight's weight and split; config forces a Config, for tuning and tests."""
    scores(x, weight, split, terms, batch_invariant, not weight_updated, out, config)


def _cublas(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """cuBLAS fp32, whatever precision the process allows fp32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        torch.mm(x.float(), weight.T, out=out)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def linear(x: torch.Tensor, weight: torch.Tensor, terms: int, out: torch.Tensor) -> None:
    """Scores with a weight of somebody else's, who may have written it just before."""
    if weight.dtype == torch.float32 and tuned.linear_uses_cublas(x.device, x.shape[0], *weight.shape):
        return _cublas(x, weight, out)
    scores(x, weight, None, terms, False, False, out)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    split: torch.Tensor | None,
    terms: int,
    k: int,
    scoring: str,
    bias: torch.Tensor | None,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
    weight_updated: bool,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Scores to scratch of this call, then the choice of experts: two kernels, chained."""
    scratch = x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
    scores(x, weight, split, terms, False, not weight_updated, scratch)
    _C.topk(
        scratch.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        x.shape[0],
        weight.shape[0],
        k,
        scoring == "sigmoid",
        num_groups,
        topk_groups,
        renormalize,
        scale,
        x.device.index,
        _stream(x.device),
    )
