"""The kernel of ``pages.fill``: a grid of requests and a few programs each, which stride over the request's pages."""

import triton
import triton.language as tl


@triton.jit
def fill_pages(
    req_to_token,  # [requests, tokens] int32, rows token_stride apart
    req_pool_indices,  # [B]
    seq_lens,  # [B]
    lengths,  # [B] int32, out
    table,  # [B, pages] int32, rows table_stride apart, out
    window_table,  # the same, out, or nothing
    full_to_window,  # [slots] or nothing
    token_stride,
    table_stride,
    pages,
    window_slots,
    NEW_TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1)
    length = tl.load(seq_lens + request).to(tl.int32) + NEW_TOKENS
    if first == 0:
        tl.store(lengths + request, length)
    used = tl.minimum((length + PAGE_SIZE - 1) // PAGE_SIZE, pages)
    row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * token_stride
    for start in range(first * BLOCK, used, PROGRAMS * BLOCK):
        page = start + tl.arange(0, BLOCK)
        inside = page < used
        slot = tl.load(row + page.to(tl.int64) * PAGE_SIZE, mask=inside, other=0)
        tl.store(table + request * table_stride + page, (slot // PAGE_SIZE).to(tl.int32), mask=inside)
        if WINDOW:
            # Slots that slid out of the window map to anything; they are kept inside the mapping and the pool.
            known = tl.minimum(tl.maximum(slot, 0), window_slots - 1).to(tl.int64)
            window_slot = tl.maximum(tl.load(full_to_window + known, mask=inside, other=0), 0)
            tl.store(window_table + request * table_stride + page, (window_slot // PAGE_SIZE).to(tl.int32), mask=inside)
