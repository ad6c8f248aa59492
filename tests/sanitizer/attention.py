"""Small calls of the plan kernel and of every decode kernel: kinds, head_dims, rows, options, clusters, short runs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
from device import Gpu, bf16

PACKAGE = "hpc_attention"
NUM_SMS = 132
BF16, FP16, E4M3 = 0, 1, 2  # as the extension numbers them


@dataclass(frozen=True)
class Case:
    """One plan and one call. ``scales``: of each key, and of each head's values."""

    kv: int
    query: int
    lengths: tuple[int, ...] = (1, 64, 700, 0, 130, 65)
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 64
    q_len: int = 1
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    lse: bool = False
    scales: bool = False
    invariant: bool = False
    max_seq_len: int = 1 << 20
    num_ctas: int = 0  # 0: as many as a plan takes
    large: bool = False


def cases(core: ModuleType) -> Iterator[Case]:
    for kind in (Case(BF16, BF16), Case(FP16, FP16), Case(E4M3, BF16), Case(E4M3, FP16), Case(E4M3, E4M3)):
        for head_dim in (64, 128, 256):
            for heads, q_len in ((8, 1), (32, 1), (24, 2), (32, 8)):  # 4, 16, 24 and 128 rows
                if head_dim == 128 or heads == 8 or FP16 not in (kind.kv, kind.query):
                    yield replace(kind, head_dim=head_dim, num_q_heads=heads, q_len=q_len)
        yield replace(kind, page_size=1, window=100, softcap=8.0, sinks=True, lse=True, scales=kind.kv == E4M3)
        yield replace(kind, page_size=16, q_len=3, window=70, lse=True)
        yield replace(kind, invariant=True, lengths=(1300, 65, 1, 0, 5000), max_seq_len=8192, lse=True)
    for kind in (Case(BF16, BF16), Case(E4M3, BF16)):
        # Without options short requests have a kernel of their own. A cluster of 16 takes racecheck as long as thirty
        # other cases.
        for sinks in (False, True):
            one = replace(kind, num_kv_heads=1, max_seq_len=4096, sinks=sinks)
            yield from (replace(one, lengths=(length,), large=length != 1000) for length in (4096, 1000, 0))
            heads = replace(kind, num_q_heads=64, num_kv_heads=8, max_seq_len=2048, sinks=sinks)  # clusters of 8
            yield replace(heads, lengths=(2000,))
        yield replace(kind, lengths=tuple(64 + 3 * i for i in range(200)), num_kv_heads=1)  # a warp's pieces; weighed
        yield replace(kind, lengths=tuple(300 + i for i in range(24)), num_q_heads=16, num_kv_heads=1)  # teams
        yield replace(kind, lengths=(20_000, 64, 5), num_kv_heads=1)
        yield replace(kind, lengths=(2000, 1500, 100), num_q_heads=64, num_kv_heads=8, page_size=256)  # heads abreast
        yield replace(kind, lengths=(256,) * 150, num_q_heads=16, page_size=128)
        yield replace(kind, lengths=(3000, 1100), num_kv_heads=1, num_ctas=3)  # many tiles a CTA, asked for by turns
        # Clusters of two: pairs cut in two, beside others; of heads.
        yield replace(kind, lengths=tuple(1000 + 3 * i for i in range(64)), num_kv_heads=1)
        yield replace(kind, lengths=((1020,) * 7 + (300, 1024, 0, 1500, 1000)) * 5, num_kv_heads=1, lse=True)
        yield replace(kind, lengths=(1100,) * 8, num_q_heads=64, num_kv_heads=8)


def run(core: ModuleType, gpu: Gpu, case: Case) -> np.ndarray:
    """Bytes of the output (and lse) of a call that waits, and of one that reads all that it may before its wait."""
    heads, dim, page = case.num_kv_heads, case.head_dim, case.page_size
    lengths, kv_bytes = np.array(case.lengths, np.int32), 1 if case.kv == E4M3 else 2
    batch, tokens, rows = len(lengths), len(lengths) * case.q_len, case.q_len * case.num_q_heads // heads
    num_ctas = case.num_ctas
    if batch == 1 and not case.invariant:
        num_ctas = core.decode_cluster_ctas(0, case.kv, dim, rows, heads, case.max_seq_len)
    num_ctas = num_ctas or NUM_SMS * core.decode_ctas_per_sm(0, case.kv, dim, rows)
    window = min(case.window, case.max_seq_len)
    plan = core.plan_config(
        max_batch=batch, num_q_heads=case.num_q_heads, num_kv_heads=heads, head_dim=dim, q_len=case.q_len,
        window=window, kv_bytes=kv_bytes, num_ctas=num_ctas, max_seq_len=case.max_seq_len,
        batch_invariant=case.invariant,
    )  # fmt: skip
    shape = (heads, case.q_len, window, case.max_seq_len, num_ctas, case.invariant, batch, plan["min_tiles"])
    empty = np.zeros(plan["map_bytes"], np.uint8)
    core.plan_update_cpu(lengths.ctypes.data, 0, empty.ctypes.data, empty.nbytes, *shape)  # as a new plan's
    plan_map = gpu.put(empty)
    core.plan_update_cuda(0, 0, gpu.put(lengths), batch, plan_map, empty.nbytes, *shape)

    def values(kind: int, *sizes: int) -> int:
        if kind == E4M3:
            return gpu.put(gpu.e4m3(*sizes))
        drawn = gpu.normal(*sizes)
        return gpu.put(bf16(drawn) if kind == BF16 else drawn.astype(np.float16))

    each = max(1, -(-int(lengths.max()) // page))
    pages = batch * each
    sizes = (page * heads * dim, heads * dim, dim)  # strides of pages, tokens and heads
    strides = tuple(stride if count > 1 else 0 for stride, count in zip(sizes, (pages, page, heads), strict=True))
    by_rows = (case.num_q_heads * dim, dim)
    query_scale = key_scale = (0, 0, 0)
    if case.query == E4M3:
        query_scale = (gpu.put(gpu.uniform(tokens, case.num_q_heads)), case.num_q_heads, 1)
    key_scale, value_scale = (0, 0, 0, 0), (0, 0)
    if case.scales:
        key_scale = (gpu.put(gpu.uniform(pages, page, heads)), page * heads, heads if page > 1 else 0, 1)
        value_scale = (gpu.put(gpu.uniform(heads)), 1)
    inputs = (
        (values(case.query, tokens, case.num_q_heads, dim), *by_rows), query_scale,
        (values(case.kv, pages, page, heads, dim), *strides), (values(case.kv, pages, page, heads, dim), *strides),
        (gpu.put(gpu.random.permutation(pages).astype(np.int32)), each), key_scale, case.scales, value_scale,
        gpu.put(gpu.normal(case.num_q_heads)) if case.sinks else 0,
    )  # fmt: skip
    found = []
    for early in (False, True):  # what may be read before the wait: nothing; all, for what is read is long there then
        out = gpu.empty(tokens * case.num_q_heads * dim * 2)
        lse = gpu.empty(tokens * case.num_q_heads * 4) if case.lse else 0
        core.decode(
            0, 0, case.kv, case.query, batch, dim, case.num_q_heads, heads, page, pages, each, case.q_len, window,
            num_ctas, batch, case.invariant, case.max_seq_len, *inputs, (out, *by_rows),
            (lse, case.num_q_heads, 1) if lse else (0, 0, 0), plan_map, empty.nbytes,
            gpu.empty(plan["workspace_bytes"]), plan["workspace_bytes"], dim**-0.5, 1.0, case.softcap, early, 0, 0, -1,
        )  # fmt: skip
        found.append(gpu.get(out, tokens * case.num_q_heads * dim * 2))
        found += [gpu.get(lse, tokens * case.num_q_heads * 4)] if lse else []
    return np.concatenate(found)
