"""Argument checks of the public functions. Metadata only, so that they run under torch.compile and on fake tensors."""

import sys
from typing import Any

import torch
from hpc_common.capability import require
from hpc_common.checks import (
    check_aligned_16,
    check_contiguous,
    check_dtype,
    check_int,
    check_same_device,
    check_shape,
    check_strides_16,
    check_tensor,
    fail,
    shape_text,
)

from .support import SUPPORT, feature

SCORINGS = ("softmax", "sigmoid")


def check_terms(where: str, terms: Any) -> int:
    """``terms`` as 1, 2 or 3."""
    return check_int(where, "terms", terms, 1, 3)


def check_weight(where: str, argument: str, weight: Any) -> None:
    """A weight [N, K], fp32 or bf16, N >= 1, K a positive multiple of 8."""
    check_tensor(where, argument, weight)
    check_dtype(where, argument, weight, (torch.float32, torch.bfloat16))
    check_shape(where, argument, weight, ("N", "K"))
    if weight.shape[0] < 1:
        fail(where, argument, "at least one expert (N >= 1)", shape_text(weight))
    if weight.shape[1] < 8 or weight.shape[1] % 8:
        fail(where, argument, "K to be a positive multiple of 8", shape_text(weight))


def check_x(where: str, x: Any, weight: torch.Tensor) -> None:
    """x [M, K] bf16 on the weight's device, rows dense and a multiple of 16 bytes apart."""
    check_tensor(where, "x", x)
    check_dtype(where, "x", x, (torch.bfloat16,))
    check_shape(where, "x", x, ("M", weight.shape[1]))
    check_same_device(where, "x", x, weight.device, "weight")
    check_strides_16(where, "x", x)


def check_out(where: str, out: Any, x: torch.Tensor, experts: int) -> None:
    """out [M, N] fp32, contiguous, on x's device."""
    check_tensor(where, "out", out)
    check_dtype(where, "out", out, (torch.float32,))
    check_shape(where, "out", out, (x.shape[0], experts))
    check_same_device(where, "out", out, x.device, "x")
    check_contiguous(where, "out", out)


def check_flag(where: str, argument: str, value: Any) -> None:
    """TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        fail(where, argument, "a bool", f"{type(value).__name__} {value!r}", TypeError)


def check_route(
    where: str,
    weight: torch.Tensor,
    k: Any,
    scoring: Any,
    bias: Any,
    num_groups: Any,
    topk_groups: Any,
    renormalize: Any,
    scale: Any,
) -> None:
    """The options of ``route`` for a weight [N, K]."""
    experts = weight.shape[0]
    check_int(where, "k", k, 1, experts)
    if not isinstance(scoring, str) or scoring not in SCORINGS:
        fail(where, "scoring", " or ".join(map(repr, SCORINGS)), repr(scoring))
    if bias is not None:
        check_dtype(where, "bias", bias, (torch.float32,))
        check_shape(where, "bias", bias, (experts,))
        check_same_device(where, "bias", bias, weight.device, "weight")
        check_contiguous(where, "bias", bias)
    check_int(where, "num_groups", num_groups, 1, experts)
    check_int(where, "topk_groups", topk_groups, 1, num_groups)
    if num_groups > 1:
        size = experts // num_groups
        if experts % num_groups or size < 2:
            expected = f"a divisor of the {experts} experts that leaves groups of two or more"
            fail(where, "num_groups", expected, num_groups)
        if k > size * topk_groups:
            expected = f"at most the {size * topk_groups} experts of {topk_groups} groups of {size}"
            fail(where, "k", expected, k)
    check_flag(where, "renormalize", renormalize)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        fail(where, "scale", "a float", type(scale).__name__, TypeError)
    # A comparison, so that it traces with a symbolic scale; it refuses an int that no float holds, too.
    if not -sys.float_info.max <= scale <= sys.float_info.max:
        fail(where, "scale", "a finite float", scale)


def check_memory(where: str, operator: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """What needs real tensors, for the implementations: the device runs this, and addresses are 16-byte aligned."""
    require(where, SUPPORT, operator, feature(weight.dtype), x.device)
    check_aligned_16(where, "x", x)
    check_aligned_16(where, "weight", weight)
