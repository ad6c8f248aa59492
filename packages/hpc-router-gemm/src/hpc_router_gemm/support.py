"""What runs where: one table for the checks, the tests and the README."""

import torch
from hpc_common.capability import Support, as_device
from hpc_common.capability import why_not as _why_not
from hpc_common.checks import fail

_WHERE = "hpc_router_gemm.is_supported"

# One row per operator and kind of weight.
SUPPORT: tuple[Support, ...] = (
    Support("router_gemm", "fp32 weight, terms 1 to 3", cuda=True),
    Support("router_gemm", "bf16 weight", cuda=True),
    Support("linear", "fp32 weight, terms 1 to 3", cuda=True),
    Support("linear", "bf16 weight", cuda=True),
    Support("route", "fp32 weight, terms 1 to 3", cuda=True),
    Support("route", "bf16 weight", cuda=True),
)

_FEATURES = {torch.float32: "fp32 weight, terms 1 to 3", torch.bfloat16: "bf16 weight"}


def feature(weight_dtype: torch.dtype) -> str:
    """The table's feature for a weight of ``weight_dtype``; ValueError where there is none."""
    if weight_dtype not in _FEATURES:
        raise ValueError(f"hpc_router_gemm: weight_dtype: expected torch.float32 or torch.bfloat16, got {weight_dtype}")
    return _FEATURES[weight_dtype]


def why_not(
    operator: str,
    *,
    device: torch.device | str | None = None,
    weight_dtype: torch.dtype = torch.float32,
    terms: int = 2,
) -> str:
    """Why ``operator`` ("router_gemm", "linear", "route") does not run so on ``device``; "" where it does.

    device: None is the current GPU where there is one, else the CPU. A device that is not there, or
    that runs nothing (meta), is a reason.

    The reason names the missing kernel, or the device's compute capability and the one needed, or the wrong value.
    Raises TypeError for an operator that is no string or a device that is none, ValueError for a string that names no
    device.
    """
    if not isinstance(operator, str):
        fail(_WHERE, "operator", "a str", f"{type(operator).__name__} {operator!r}", TypeError)
    if operator not in {row.operator for row in SUPPORT}:
        return f"no operator {operator!r}"
    if not isinstance(weight_dtype, torch.dtype) or weight_dtype not in _FEATURES:
        return f"weights are torch.float32 or torch.bfloat16, not {weight_dtype}"
    if terms not in (1, 2, 3):
        return f"terms is 1, 2 or 3, not {terms}"
    return _why_not(SUPPORT, operator, feature(weight_dtype), as_device(_WHERE, device))


def is_supported(
    operator: str,
    *,
    device: torch.device | str | None = None,
    weight_dtype: torch.dtype = torch.float32,
    terms: int = 2,
) -> bool:
    """Whether ``operator`` runs so on ``device``: ``why_not`` with the reason left out."""
    return not why_not(operator, device=device, weight_dtype=weight_dtype, terms=terms)
