"""Small calls of every kernel of fused_moe; each says beside it which kernels it is for."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from device import Gpu, bf16

PACKAGE = "hpc_moe"
NUM_SMS = 132


@dataclass(frozen=True)
class Case:
    """One call. ``one``: all tokens on one expert. ``large``: too much for racecheck."""

    quant: str
    tokens: int
    top_k: int
    experts: int
    hidden: int
    inter: int
    bf16_x: bool = False
    skip: float = 0.0
    wide_ids: bool = False
    shared: bool = False
    factor: float = 1.0
    limit: float | None = None
    ranks: int = 1
    rank: int = 0
    invariant: bool = False
    one: bool = False
    large: bool = False


def cases(core: ModuleType) -> Iterator[Case]:
    for quant in ("tensor", "block"):
        for x in (False, True):
            yield Case(quant, 2, 4, 16, 512, 256, x)  # few pairs
            yield Case(quant, 3, 8, 16, 256, 192, x, wide_ids=True)  # few pairs, groups of 64
            yield Case(quant, 40, 8, 64, 512, 256, x, skip=0.2)  # low
            yield Case(
                quant, 20, 4, 16, 2304, 192, x, wide_ids=True, shared=True, factor=2.5
            )  # 32 columns, groups of 64
            yield Case(quant, 8, 2, 4, 2176, 768, x, limit=1.0)  # low
            yield Case(quant, 150, 4, 16, 512, 256, x)  # mid, fp32 sums, 64 rows
        yield Case(quant, 6, 2, 2, 2048, 768)  # low, 16 columns, slots of three groups
        yield Case(quant, 6, 2, 2, 1024, 1536)  # low, tiles shared by warps
        yield Case(quant, 3, 2, 2, 4096, 1536)  # the same, 32 columns
        yield Case(quant, 6, 4, 4, 2304, 64)  # few pairs, 32 columns
        yield Case(quant, 9, 4, 16, 512, 256, skip=1.0, shared=True)  # no slot lives
        yield Case(quant, 30, 8, 8, 512, 320, True, ranks=4, rank=1, skip=0.1)  # another rank's ids
        yield Case(quant, 150, 8, 64, 256, 256)  # fp32 sums, 32 rows
        yield Case(quant, 300, 4, 16, 256, 192, True)  # fp32 sums, 128 rows
        yield Case(quant, 280, 4, 8, 256, 256)  # fp32 sums, large
        yield Case(quant, 90, 8, 16, 256, 128, invariant=True, one=True)
        # The index of eight CTAs, of more than 2,048 pairs, takes racecheck ten times as long as what follows it: few
        # experts with more columns of I instead, where the kernel that is meant allows it.
        yield Case(quant, 100, 8, 40, 256, 512)  # mid, 32 rows
        yield Case(quant, 160, 8, 33, 256, 512, True, skip=0.2)  # 64 rows
        yield Case(quant, 250, 8, 33, 256, 512)  # 128 rows; by block tokens are M
        yield Case(quant, 250, 8, 56, 512, 320, ranks=2, rank=1)  # an odd number of units
        yield Case(quant, 200, 8, 96, 512, 192, True)  # short rows of w2, 32 rows
        yield Case(quant, 256, 8, 88, 512, 192)  # the same, 64 rows
        yield Case(quant, 200, 8, 64, 2048, 384)  # y dropped from L2
        yield Case(quant, 500, 4, 6, 512, 768, True)  # large: clusters; per tensor an even number of tiles
        yield Case(quant, 1400, 4, 8, 512, 192)  # tasks of three units; by block rows of h are kept; index of eight
        yield Case(quant, 500, 4, 8, 1024, 576, limit=1.0, shared=True)  # large, an odd number of units
        if quant == "tensor":
            yield Case(quant, 200, 8, 80, 128, 512, one=True)  # tall tiles, 32 rows
            yield Case(quant, 250, 8, 44, 128, 768, one=True)  # the same, 64 rows
        yield Case(quant, 350, 4, 8, 256, 1024)  # large; by block three blocks of 64 rows for two CTAs
        yield Case(quant, 1400, 4, 32, 256, 192, True)  # the same with groups of 64; per tensor three units
        yield Case(quant, 600, 32, 160, 1024, 128, large=True)  # panels of y
        yield Case(quant, 33_000, 1, 16, 128, 64, large=True)  # two chunks
    for tokens, inter in ((5, 256), (150, 192), (500, 320), (2000, 128)):
        yield Case("none", tokens, 4, 8, 512, inter, True, skip=0.1, shared=inter == 192)
    yield Case("none", 40, 4, 4, 256, 64, True, ranks=2, rank=1, invariant=True, wide_ids=True)


def run(core: ModuleType, gpu: Gpu, case: Case) -> np.ndarray:
    """The output's bytes."""
    tokens, top_k, experts, hidden, inter = case.tokens, case.top_k, case.experts, case.hidden, case.inter
    block, fp8, everyone = case.quant == "block", case.quant != "none", case.experts * case.ranks
    config = core.make_config(
        num_tokens=tokens, top_k=top_k, num_local_experts=experts, num_experts=everyone, hidden=hidden,
        intermediate=inter, quant=case.quant, x_is_bf16=case.bf16_x, batch_invariant=case.invariant, num_sms=NUM_SMS,
    )  # fmt: skip
    ids = np.full((tokens, top_k), everyone - 2) if case.one else gpu.random.integers(0, everyone, (tokens, top_k))
    ids = np.where(gpu.random.random((tokens, top_k)) < case.skip, -1, ids)
    group = 128 if inter % 128 == 0 else 64

    def scales(*shape: int) -> int:
        return gpu.put(gpu.uniform(*shape) * 0.05 + 0.01)

    w13_scale = w2_scale = x_scale = act_scale = 0
    if block:
        w13_scale, w2_scale = (
            scales(experts, 2 * inter // group, hidden // 128),
            scales(experts, hidden // 128, inter // group),
        )
        x_scale = 0 if case.bf16_x else scales(tokens, hidden // 128)
    elif fp8:
        w13_scale, w2_scale, x_scale, act_scale = scales(experts), scales(experts), scales(1), scales(1)
    shapes = ((experts, 2 * inter, hidden), (experts, hidden, inter))
    w13, w2 = (gpu.e4m3(*shape) if fp8 else bf16(gpu.normal(*shape) / shape[2] ** 0.5) for shape in shapes)
    row_scales = block and not case.bf16_x
    out = gpu.empty(tokens * hidden * 2)
    core.fused_moe(
        config=config, quant=("none", "block", "tensor").index(case.quant), tokens=tokens, top_k=top_k,
        num_local=experts, hidden=hidden, intermediate=inter, ep_rank=case.rank,
        x=gpu.put(bf16(gpu.normal(tokens, hidden)) if case.bf16_x else gpu.e4m3(tokens, hidden)), x_stride=hidden,
        x_is_bf16=case.bf16_x, w13=gpu.put(w13), w2=gpu.put(w2),
        topk_ids=gpu.put(ids.astype(np.int64 if case.wide_ids else np.int32)), ids_are_int64=case.wide_ids,
        id_token_stride=top_k, id_slot_stride=1, topk_weights=gpu.put(gpu.uniform(tokens, top_k)),
        weight_token_stride=top_k, weight_slot_stride=1, w13_scale=w13_scale, w2_scale=w2_scale, x_scale=x_scale,
        x_scale_stride=hidden // 128 if row_scales else 0, x_scale_step=int(row_scales), act_scale=act_scale,
        swiglu_limit=-1.0 if case.limit is None else case.limit,
        shared_output=gpu.put(bf16(gpu.normal(tokens, hidden))) if case.shared else 0, shared_stride=hidden,
        routed_scaling_factor=case.factor, workspace=gpu.empty(config.layout.bytes), out=out, out_stride=hidden,
        device=0, stream=0,
    )  # fmt: skip
    return gpu.get(out, tokens * hidden * 2)
