"""Other implementations of decode attention, for benchmarks/decode.py: what is not installed is left out.

A peer reads the same caches, page table and query as ``decode``. Its output is compared with ours before it is timed,
so a peer that was called wrongly gives no number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]


def flashinfer(
    sets: Sequence[tuple[torch.Tensor, ...]], page_table: torch.Tensor, lengths: Sequence[int]
) -> list[Call] | None:
    """FlashInfer's batched decode on tensor cores, planned once; None where it is not installed.

    sets: (q [B, Hq, D], k_cache and v_cache [pages, page_size, Hkv, D], out) of each layer, q_len 1.
    """
    try:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    except ImportError:
        return None
    q, k_cache = sets[0][:2]
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    used = [-(-length // page_size) for length in lengths]
    begin = torch.tensor([0, *used], dtype=torch.int32).cumsum(0).to(torch.int32)
    pages = torch.cat([row[:count] for row, count in zip(page_table, used, strict=True)])
    last = torch.tensor([(length - 1) % page_size + 1 for length in lengths], dtype=torch.int32)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        begin.to(q.device), pages, last.to(q.device), q.shape[1], num_kv_heads, head_dim, page_size,
        q_data_type=q.dtype, kv_data_type=k_cache.dtype,
    )  # fmt: skip
    return [lambda q=q, k=k, v=v, out=out: wrapper.run(q, (k, v), out=out) for q, k, v, out in sets]


PEERS = {"FlashInfer": flashinfer}


def agreeing(
    calls: Sequence[Call], ours: Sequence[Call], out: torch.Tensor, name: str, most: float = 0.03
) -> list[Call] | None:
    """``calls`` where their first one writes what ours does, up to ``most`` of its root mean square; else None, said.

    out: where both first calls write.
    """
    ours[0]()
    want = out.float().clone()
    out.fill_(float("nan"))
    try:
        calls[0]()
    except Exception as error:  # a peer that cannot do a case costs its row, not the run
        print(f"{name}: left out: {str(error).splitlines()[0] if str(error) else type(error).__name__}", flush=True)
        return None
    largest = float((out.float() - want).abs().max() / want.square().mean().sqrt())
    if not largest <= most:
        print(f"{name}: left out: its output differs from ours by {largest:.3g} of the root mean square", flush=True)
        return None
    return list(calls)
