"""Float64 reference of the router: scores, what a split of the weight into bf16 terms loses, error bounds, top-k.

Independent of hpc_router_gemm: bf16 rounding is done here by arithmetic on the exponent, and the choice of experts by
sorting Python tuples, so an error in the operator's bit tricks cannot repeat itself.
"""

import math
from dataclasses import dataclass

import torch

BF16_MAX = (2.0 - 2.0**-7) * 2.0**127
_BF16_MIN_EXPONENT = -126
_BF16_FRACTION_BITS = 7


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent as float64, exact for integers in [-1022, 1023] (made from the bits; exp2 may be an ulp off)."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def round_bf16(values: torch.Tensor) -> torch.Tensor:
    """``values`` rounded to the nearest bf16, ties to even, as float64 of the same shape.

    Subnormal results are kept. A finite value beyond the largest finite bf16 saturates; Inf and NaN stay.
    """
    values = values.to(torch.float64)
    finite = values.isfinite()
    safe = torch.where(finite, values, torch.zeros_like(values))
    _, exponent = torch.frexp(safe)  # |safe| in [2^(exponent-1), 2^exponent)
    quantum = power_of_two((exponent - 1).clamp_min(_BF16_MIN_EXPONENT) - _BF16_FRACTION_BITS)
    rounded = (safe / quantum).round() * quantum  # the division is by a power of two; round() ties to even
    return torch.where(finite, rounded.clamp(-BF16_MAX, BF16_MAX), values)


def split_terms(weight: torch.Tensor, terms: int) -> list[torch.Tensor]:
    """The bf16 terms of ``weight`` [N, K], largest first, as ``terms`` float64 tensors [N, K].

    Term 0 is the weight rounded to bf16; each further term is what is still missing, rounded to bf16. A weight that is
    not finite is its own first term and has zeros after it.
    """
    missing = weight.to(torch.float64)
    result = []
    for _ in range(terms):
        term = round_bf16(missing)
        result.append(term)
        missing = torch.where(term.isfinite(), missing - term, torch.zeros_like(term))
    return result


def scores(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, in float64: [M, N] on the CPU."""
    return x.to("cpu", torch.float64) @ weight.to("cpu", torch.float64).T


def split_error(x: torch.Tensor, weight: torch.Tensor, terms: int) -> torch.Tensor:
    """s: what the split alone changes in each score, float64 [M, N]. x and weight must be finite."""
    weight = weight.to("cpu", torch.float64)
    lost = torch.stack(split_terms(weight, terms)).sum(0) - weight
    return x.to("cpu", torch.float64) @ lost.T


def rounding_floor(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """f = 2^-23 * sqrt(K) * rms(x) * rms(weight row), float64 [N]: the fp32 arithmetic's share of the error."""
    x, weight = x.to("cpu", torch.float64), weight.to("cpu", torch.float64)
    return 2.0**-23 * math.sqrt(x.shape[1]) * x.square().mean().sqrt() * weight.square().mean(1).sqrt()


@dataclass(frozen=True)
class Bounds:
    """What a result of two terms may be off: rms and largest, float64 [N], one for each expert."""

    rms: torch.Tensor
    largest: torch.Tensor


def bounds(x: torch.Tensor, weight: torch.Tensor, terms: int) -> Bounds:
    """rms <= 1.15 rms(s) + f and largest <= 1.5 max|s| + 6 f, with s over the tokens of each expert.

    The statement holds for any set of experts of one scale; one expert's own sample of s is the strictest such set
    only with many tokens, so tests pool experts of one scale with ``pool``.
    """
    s, f = split_error(x, weight, terms), rounding_floor(x, weight)
    return Bounds(1.15 * s.square().mean(0).sqrt() + f, 1.5 * s.abs().amax(0) + 6 * f)


def pool(errors: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, terms: int) -> tuple[float, float]:
    """How much of the bound ``errors`` [M, N] (of experts of one scale) use up: (rms, largest), at most 1 is good."""
    s, f = split_error(x, weight, terms), rounding_floor(x, weight)
    f_rms, f_max = float(f.square().mean().sqrt()), float(f.max())
    errors = errors.to("cpu", torch.float64)
    if not bool(errors.isfinite().all()):
        return math.inf, math.inf
    rms = float(errors.square().mean().sqrt()) / (1.15 * float(s.square().mean().sqrt()) + f_rms)
    return rms, float(errors.abs().max()) / (1.5 * float(s.abs().max()) + 6 * f_max)


def score_bound(x: torch.Tensor, weight: torch.Tensor, terms: int) -> float:
    """The largest error that any score may have; two scores further apart than twice this keep their order."""
    return float(bounds(x, weight, terms).largest.max())


@dataclass(frozen=True)
class Route:
    """The reference's choice for each of M tokens.

    ids: int64 [M, k], best first. weights: float64 [M, k]. margin: float64 [M], choice value of the last chosen expert
    minus the best one left out among the groups chosen (inf where none was left out). group_margin: the same for
    groups. Choice values are raw scores without a bias, else probabilities plus bias; groups always compare
    probabilities (plus bias).
    """

    ids: torch.Tensor
    weights: torch.Tensor
    margin: torch.Tensor
    group_margin: torch.Tensor


def _descending(values: dict[int, float]) -> list[int]:
    """Keys by falling value; equal values by rising key; NaN after everything else."""
    return sorted(values, key=lambda i: (math.isnan(values[i]), 0.0 if math.isnan(values[i]) else -values[i], i))


def _margin(values: dict[int, float], order: list[int], taken: int) -> float:
    return values[order[taken - 1]] - values[order[taken]] if taken < len(order) else math.inf


def route(
    scores: torch.Tensor,
    k: int,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> Route:
    """Top-k of ``scores`` [M, N] as hpc_router_gemm.route words it, token by token in Python floats.

    bias [N] moves the choice only; a group's value is the sum of its two best; ties go to the lower id.
    """
    scores = scores.to("cpu", torch.float64)
    probabilities = scores.softmax(-1) if scoring == "softmax" else scores.sigmoid()
    tokens, experts = scores.shape
    size = experts // num_groups
    shift = [0.0] * experts if bias is None else bias.to("cpu", torch.float64).tolist()
    ids, weights, margins, group_margins = [], [], [], []
    for raw, p in zip(scores.tolist(), probabilities.tolist(), strict=True):
        value = {i: p[i] + shift[i] for i in range(experts)}
        groups, group_margin = list(range(num_groups)), math.inf
        if num_groups > 1:
            best = {}
            for g in range(num_groups):
                members = {i: value[i] for i in range(g * size, (g + 1) * size)}
                first, second = _descending(members)[:2]
                best[g] = value[first] + value[second]
            order = _descending(best)
            groups, group_margin = order[:topk_groups], _margin(best, order, topk_groups)
        allowed = [i for g in groups for i in range(g * size, (g + 1) * size)]
        choice = {i: raw[i] if bias is None else value[i] for i in allowed}
        order = _descending(choice)
        chosen = [p[i] for i in order[:k]]
        if renormalize:
            total = sum(chosen)
            chosen = [w / total if total != 0 else 0.0 for w in chosen]
        ids.append(order[:k])
        weights.append([scale * w for w in chosen])
        margins.append(_margin(choice, order, k))
        group_margins.append(group_margin)
    return Route(
        torch.tensor(ids, dtype=torch.int64).reshape(tokens, k),
        torch.tensor(weights, dtype=torch.float64).reshape(tokens, k),
        torch.tensor(margins, dtype=torch.float64),
        torch.tensor(group_margins, dtype=torch.float64),
    )
