"""Small calls of every compiled router kernel: tiles alone, split over clusters, with sums of either kind, in pairs."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from device import Gpu, bf16

PACKAGE = "hpc_router_gemm"


@dataclass(frozen=True)
class Gemm:
    """Scores: of a Config by hand where ``fields`` names one, else of the chosen one."""

    m: int
    n: int
    k: int
    weight_is_bf16: bool = False
    terms: int = 2
    fields: dict[str, Any] = field(default_factory=dict)
    batch_invariant: bool = False
    large: bool = False


@dataclass(frozen=True)
class Choice:
    """The choice of k experts."""

    m: int
    n: int
    k: int
    sigmoid: bool = False
    biased: bool = False
    groups: tuple[int, int] = (1, 1)
    large: bool = False


def configs(core: ModuleType) -> Iterator[dict[str, Any]]:
    """Fields of make_config; not every one of them is one."""
    for (rows, tokens), (split, stages) in itertools.product(core.STREAM_TILES, ((1, 0), (3, 2), (8, 1))):
        yield dict(kernel="stream", rows=rows, tokens=tokens, split=split, stages=stages)
    kinds = (
        (core.WGMMA_TILES, {}),
        (core.TERM_TILES, dict(presplit=True)),
        (core.PAIRED_TILES, dict(presplit=True, paired=True)),
        (core.PAIRED_EXPERT_TILES, dict(presplit=True, paired=True, pairs_experts=True)),
    )
    splits = ((1, False), (2, False), (3, False), (2, True), (4, True))
    for tiles, more in kinds:
        for (rows, k_groups, tokens), (split, apart) in itertools.product(tiles, splits):
            yield dict(
                kernel="tile", rows=rows, k_groups=k_groups, tokens=tokens, split=split, sums_apart=apart, **more
            )
    for split, stages in ((1, 5), (1, 11), (2, 11)):  # two rings, and one where a CTA has its SM alone
        yield dict(kernel="tile", rows=64, k_groups=1, tokens=64, split=split, stages=stages)


def cases(core: ModuleType) -> Iterator[Gemm | Choice]:
    for (is_bf16, terms), fields in itertools.product(((False, 2), (False, 3), (False, 1), (True, 1)), configs(core)):
        tokens, few = fields["tokens"], fields["kernel"] == "stream" and fields["tokens"] < 32
        m, n, k = (9, 70, 1160) if few else (tokens + 5 if tokens >= 64 else 2 * tokens + 3, 150, 648)
        try:
            core.make_config(m=m, n=n, k=k, weight_is_bf16=is_bf16, terms=terms, **fields)
        except ValueError:
            continue
        # A split is a number to a kernel: one with each kind of sum is enough for racecheck.
        large = fields["split"] in (4, 8) or (fields["split"] == 2 and fields.get("sums_apart") is False)
        yield Gemm(m, n, k, is_bf16, terms, fields, large=large)
    for m, n, k, invariant in ((1, 192, 4096, False), (1, 64, 512, True), (40, 130, 512, True), (5, 33, 24, False)):
        yield Gemm(m, n, k, batch_invariant=invariant)
    yield Gemm(16, 192, 4096, True, 1)
    yield Gemm(1, 1, 8)
    for m in (3, 300):
        yield Choice(m, 256, 8)
        yield Choice(m, 192, 8, True, True, (8, 4))
        yield Choice(m, 384, 8)
        yield Choice(m, 896, 16, biased=True)
        yield Choice(m, 768, 32, True, True, (16, 3))
        yield Choice(m, 5, 5)
        yield Choice(m, 1024, 32, False, True, (32, 2))
        yield Choice(m, 64, 32, False, True, (32, 16))
        yield Choice(m, 2000, 40)
        yield Choice(m, 2048, 64, True, True, (64, 7))
        yield Choice(m, 1, 1)


def terms_of(weight: np.ndarray, count: int) -> np.ndarray:
    """Bits of the weight's bf16 terms, as RouterWeight.split has them: [2, N, K] or [ceil(K / 64), 3, N, 64]."""
    terms, rest = [], weight
    for _ in range(count):
        terms.append(bf16(rest))
        rest = rest - (terms[-1].astype(np.uint32) << 16).view(np.float32)
    stacked = np.stack(terms)
    if count != 3:
        return stacked
    n, k = weight.shape
    padded = np.zeros((3, n, -(-k // 64) * 64), stacked.dtype)
    padded[:, :, :k] = stacked
    return np.ascontiguousarray(padded.reshape(3, n, -1, 64).transpose(2, 0, 1, 3))


def run(core: ModuleType, gpu: Gpu, case: Gemm | Choice) -> np.ndarray:
    """The output's bytes: scores, or ids and weights."""
    m, n, k = case.m, case.n, case.k
    if isinstance(case, Choice):
        scores = gpu.normal(m, n) * 2
        scores[:, n // 2] = scores[:, 0]
        scores[1, ::3] = -np.inf
        scores[2] = np.nan
        bias = gpu.put(gpu.normal(n)) if case.biased else 0
        ids, weights = gpu.empty(m * k * 4), gpu.empty(m * k * 4)
        core.topk(gpu.put(scores), bias, ids, weights, m, n, k, case.sigmoid, *case.groups, True, 2.5, 0, 0)
        return np.concatenate([gpu.get(ids, m * k * 4), gpu.get(weights, m * k * 4)])
    weight = gpu.normal(n, k)
    config = None
    if case.fields:
        config = core.make_config(m=m, n=n, k=k, weight_is_bf16=case.weight_is_bf16, terms=case.terms, **case.fields)
    split = gpu.put(terms_of(weight, case.terms)) if case.fields.get("presplit") else 0
    x = np.zeros((m, k + 8), np.uint16)  # rows further apart than they are long
    x[:, :k] = bf16(gpu.normal(m, k))
    scores = gpu.empty(m * n * 4)
    core.router_gemm(
        gpu.put(x), gpu.put(bf16(weight) if case.weight_is_bf16 else weight), split, scores, m, n, k, k + 8, k, n,
        case.weight_is_bf16, case.terms, case.batch_invariant, True, 0, 0, config,
    )  # fmt: skip
    return gpu.get(scores, m * n * 4)
