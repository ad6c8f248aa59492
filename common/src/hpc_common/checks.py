"""Argument checks with one wording for every operator.

A message names operator, argument, what was expected and what came:
``hpc_attention.decode: k_cache: expected page_size in (1, 16), got 48 (shape [10, 48, 8, 128])``.
Only metadata is read (dtype, shape, stride, device), so checks also run under ``torch.compile`` and on fake tensors.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch


def fail(where: str, argument: str, expected: str, got: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raise ``error`` with the repository's wording.

    Args:
        where: operator with its module, e.g. ``"hpc_attention.decode"``.
        argument: the argument's name as the caller wrote it.
        expected: what would have been accepted.
        got: what came.
        error: ValueError (default) or TypeError.
    """
    raise error(f"{where}: {argument}: expected {expected}, got {got}")


def shape_text(tensor: torch.Tensor) -> str:
    """``shape [10, 48, 8, 128]``, for the end of a message."""
    return f"shape {list(tensor.shape)}"


def check_tensor(where: str, argument: str, value: Any) -> torch.Tensor:
    """``value`` as a tensor, else TypeError; ValueError for a sparse or jagged one."""
    if not isinstance(value, torch.Tensor):
        fail(where, argument, "a torch.Tensor", type(value).__name__, TypeError)
    if value.layout is not torch.strided:
        fail(where, argument, "a dense (strided) tensor", f"layout {value.layout}")
    return value


def check_dtype(where: str, argument: str, tensor: torch.Tensor, allowed: Iterable[torch.dtype]) -> None:
    """TypeError unless ``tensor.dtype`` is one of ``allowed``."""
    check_tensor(where, argument, tensor)
    allowed = tuple(allowed)
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        fail(where, argument, f"dtype {names}", tensor.dtype, TypeError)


def check_shape(where: str, argument: str, tensor: torch.Tensor, expected: Sequence[int | str]) -> None:
    """ValueError unless the shape matches; a string in ``expected`` names a size that may be anything."""
    check_tensor(where, argument, tensor)
    same_rank = tensor.dim() == len(expected)
    if not same_rank or any(
        not isinstance(want, str) and want != have for want, have in zip(expected, tensor.shape, strict=True)
    ):
        wanted = ", ".join(str(size) for size in expected)
        fail(where, argument, f"shape [{wanted}]", shape_text(tensor))


def check_same_device(where: str, argument: str, tensor: torch.Tensor, device: torch.device, owner: str) -> None:
    """ValueError unless ``tensor`` lies on ``device``, the device of the argument ``owner``."""
    check_tensor(where, argument, tensor)
    if tensor.device != device:
        fail(where, argument, f"device {device} (the device of {owner})", f"device {tensor.device}")


def check_dense_last(where: str, argument: str, tensor: torch.Tensor) -> None:
    """ValueError unless the last dimension is dense (stride 1, or at most one element)."""
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(where, argument, "a dense last dimension (stride 1)", f"stride {tensor.stride(-1)} ({shape_text(tensor)})")


def check_contiguous(where: str, argument: str, tensor: torch.Tensor) -> None:
    """ValueError unless ``tensor`` is contiguous."""
    if not tensor.is_contiguous():
        fail(where, argument, "a contiguous tensor", f"strides {list(tensor.stride())} ({shape_text(tensor)})")


def check_strides_16(where: str, argument: str, tensor: torch.Tensor) -> None:
    """ValueError unless the last dimension is dense and every other stride is a multiple of 16 bytes.

    The base address is checked where memory exists (not on fake tensors); kernels load 16 bytes at a time.
    """
    check_dense_last(where, argument, tensor)
    size = tensor.element_size()
    for dim in range(tensor.dim() - 1):
        if tensor.shape[dim] > 1 and (tensor.stride(dim) * size) % 16:
            fail(
                where,
                argument,
                f"stride({dim}) to be a multiple of 16 bytes",
                f"{tensor.stride(dim)} elements of {size} bytes ({shape_text(tensor)})",
            )


def check_aligned_16(where: str, argument: str, tensor: torch.Tensor) -> None:
    """ValueError unless the tensor's first byte is 16-byte aligned. Reads the address: not for fake tensors."""
    if tensor.numel() and tensor.data_ptr() % 16:
        fail(where, argument, "a 16-byte aligned first element", f"address {tensor.data_ptr():#x}")


def check_int(where: str, argument: str, value: Any, low: int, high: int) -> int:
    """``value`` as an int in [low, high]; TypeError for other types (bool too), ValueError outside."""
    if isinstance(value, bool) or not isinstance(value, int):
        fail(where, argument, "an int", f"{type(value).__name__} {value!r}", TypeError)
    if not low <= value <= high:
        fail(where, argument, f"an int in [{low}, {high}]", value)
    return value
