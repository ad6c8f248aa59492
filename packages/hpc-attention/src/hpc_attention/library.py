"""The torch.library namespace ``hpc_attention``: one place defines it, the operator's module adds its schema."""

from collections.abc import Callable

import torch

_library = torch.library.Library("hpc_attention", "DEF")


def register(name: str, schema: str, cpu: Callable[..., None], cuda: Callable[..., None]) -> Callable[..., None]:
    """Define ``hpc_attention::name`` with implementations for CPU and CUDA tensors; returns the operator.

    The operators write into arguments marked mutable and return nothing, so their fake does nothing. None has a
    gradient: the kernels record none, and neither does a CPU implementation made of torch's operators.
    """
    _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(name, torch.no_grad()(cpu), "CPU")
    _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"hpc_attention::{name}", _nothing, lib=_library)
    return getattr(torch.ops.hpc_attention, name).default


def _nothing(*_: object) -> None:
    """Nothing is returned, so there is nothing whose shape a fake could tell."""
