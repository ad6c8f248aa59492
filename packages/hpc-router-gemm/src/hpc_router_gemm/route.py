"""Router scores and the choice of experts in one call."""

import torch

from . import _cpu
from ._checks import check_memory, check_route, check_x
from .gemm import check_router_weight
from .weight import RouterWeight

_WHERE = "hpc_router_gemm.route"
_OP = "hpc_router_gemm::route"

torch.library.define(
    _OP,
    "(Tensor x, Tensor weight, Tensor? split, int terms, int k, str scoring, Tensor? bias, int num_groups, "
    "int topk_groups, bool renormalize, float scale, bool weight_updated, Tensor(a!) ids, Tensor(b!) weights) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_OP, "cpu")
@torch.no_grad()
def _route_cpu(
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
    check_memory(_WHERE, "route", x, weight)
    scores = x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
    _cpu.scores(x, weight, terms, scores)
    _cpu.choose(scores, k, scoring, bias, num_groups, topk_groups, renormalize, scale, ids, weights)


@torch.library.impl(_OP, "cuda")
@torch.no_grad()
def _route_cuda(
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
    check_memory(_WHERE, "route", x, weight)
    from . import _cuda

    if x.shape[0]:
        _cuda.route(
            x,
            weight,
            split,
            terms,
            k,
            scoring,
            bias,
            num_groups,
            topk_groups,
            renormalize,
            scale,
            weight_updated,
            ids,
            weights,
        )


@torch.library.register_fake(_OP)
def _route_fake(
    x,
    weight,
    split,
    terms,
    k,
    scoring,
    bias,
    num_groups,
    topk_groups,
    renormalize,
    scale,
    weight_updated,
    ids,
    weights,
) -> None:
    return None


def route(
    x: torch.Tensor,
    w: RouterWeight,
    k: int,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best experts of each token, and their weights.

    Args:
        x: [M, K] bf16, M from 0; rows dense, 16-byte aligned and a multiple of 16 bytes apart.
        w: RouterWeight of [N, K] on the same device.
        k: experts a token, 1 to N, and no more than topk_groups groups hold.
        scoring: "softmax" over all N experts, or "sigmoid" of each; the result is called probability below.
        bias: [N] fp32, added to the probabilities for the choice only (DeepSeek-V3's e_score_correction_bias). -inf
            keeps an expert out while others are left.
        num_groups, topk_groups: the N experts are num_groups groups of consecutive ids, of two or more each. Experts
            come from the topk_groups groups with the largest sums of their two best (probability + bias). 1: no groups.
        renormalize: divide a token's weights by their sum (a sum of 0 gives weights of 0).
        scale: multiplies the weights (routed_scaling_factor).

    Returns: ids int32 [M, k], best first, and weights fp32 [M, k]: the chosen experts' probabilities, without the bias.

    Experts compare by their fp32 scores, or by probability + bias rounded to fp32 where a bias is given; groups by fp32
    sums. Ties go to the lower id. NaN is below -inf. Ids are always distinct and valid, also for a row with NaN; such a
    row's weights are NaN where its probabilities are (all of them, for a softmax over a NaN or +inf). Between calls of
    different M a row's weights may differ in their last bits, as its scores may. No gradient.

    Raises TypeError for wrong types and dtypes; ValueError for wrong shapes, strides, devices, values outside these
    ranges, or a device that cannot run this.
    """
    check_router_weight(_WHERE, w)
    check_x(_WHERE, x, w.weight)
    check_route(_WHERE, w.weight, k, scoring, bias, num_groups, topk_groups, renormalize, scale)
    ids = x.new_empty((x.shape[0], k), dtype=torch.int32)
    weights = x.new_empty((x.shape[0], k), dtype=torch.float32)
    torch.ops.hpc_router_gemm.route(
        x,
        w.weight,
        w.split,
        w.terms,
        k,
        scoring,
        bias,
        num_groups,
        topk_groups,
        renormalize,
        float(scale),
        w.take_updated(),
        ids,
        weights,
    )
    return ids, weights
