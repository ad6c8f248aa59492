"""What runs where: the table that the checks, the tests and the README are made from."""

import torch
from hpc_common.capability import Support, as_device, require
from hpc_common.capability import why_not as _why_not
from hpc_common.checks import fail

# Value tests run on every device that a row names.
SUPPORT = (
    Support("fused_moe", "block FP8, bf16 x", cuda=True),
    Support("fused_moe", "block FP8, e4m3 x", cuda=True),
    Support("fused_moe", "per-tensor FP8, bf16 x", cuda=True),
    Support("fused_moe", "per-tensor FP8, e4m3 x", cuda=True),
    Support("fused_moe", "bf16 weights", cuda=True),
)

_WHERE = "hpc_moe.is_supported"
_NAMES = {"block": "block FP8", "tensor": "per-tensor FP8"}


def feature(quant: str, x_dtype: torch.dtype) -> str:
    """The table's feature for ``quant`` ("none", "block", "tensor") and x's dtype."""
    if quant == "none":
        return "bf16 weights"
    return f"{_NAMES[quant]}, {'e4m3' if x_dtype == torch.float8_e4m3fn else 'bf16'} x"


def check_x_dtype(where: str, quant: object, x_dtype: object) -> None:
    """ValueError for an unknown ``quant`` or an x dtype that it does not take, TypeError where x_dtype is no dtype."""
    if not isinstance(quant, str) or quant not in ("none", "block", "tensor"):
        fail(where, "quant", "none, block or tensor", repr(quant))
    if not isinstance(x_dtype, torch.dtype):
        fail(where, "x_dtype", "a torch.dtype", f"{type(x_dtype).__name__} {x_dtype!r}", TypeError)
    allowed = (torch.bfloat16,) if quant == "none" else (torch.bfloat16, torch.float8_e4m3fn)
    if x_dtype not in allowed:
        fail(where, "x_dtype", " or ".join(str(each) for each in allowed), x_dtype)


def why_not(
    quant: str = "block", x_dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None
) -> str:
    """Why ``fused_moe`` doesn't run so; "" where it does.

    Args:
        quant: "none" (bf16 weights), "block" or "tensor".
        x_dtype: torch.bfloat16 or torch.float8_e4m3fn (not with "none").
        device: cpu or cuda; None: the current GPU where there is one, else the CPU.

    A device that is not there, or that runs nothing (meta), is a reason. Raises ValueError for other values and a
    string that names no device, TypeError for other types.
    """
    check_x_dtype(_WHERE, quant, x_dtype)
    return _why_not(SUPPORT, "fused_moe", feature(quant, x_dtype), as_device(_WHERE, device))


def is_supported(
    quant: str = "block", x_dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None
) -> bool:
    """Whether ``fused_moe`` runs with this quantisation and x dtype on ``device``; see ``why_not``."""
    return not why_not(quant, x_dtype, device)


def require_supported(where: str, quant: str, x_dtype: torch.dtype, device: torch.device) -> None:
    """ValueError, saying why, unless the table has it running on ``device``."""
    require(where, SUPPORT, "fused_moe", feature(quant, x_dtype), device)
