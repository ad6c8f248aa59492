"""The page tables of a step, made on the device from SGLang's token table.

SGLang keeps a slot of the KV pool for every token of every request, ``req_to_token``; whole pages are allocated, so
page j of a request is its slot of token j * page_size, divided by page_size. On a GPU one kernel writes lengths and
tables without a word from the host, so a captured graph makes them again at every replay.
"""

import functools

import torch

_BLOCK = 1024  # table entries that one program of the kernel writes at a time
_PROGRAMS = 8  # programs a request: a million tokens in pages of 1 are 128 rounds of each


def paged(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """A layer's K or V buffer as [pages, page_size, heads, head_dim], without a copy.

    Token-major buffers [slots, heads, head_dim] are split by their own strides (``view`` would lose the slot stride
    at page_size 1 where a layer's buffer is a strided view); [pages, heads, page_size, head_dim] is transposed.
    """
    if buffer.dim() == 4:
        return buffer.transpose(1, 2)
    slots, heads, dim = buffer.shape
    stride = buffer.stride(0)
    return buffer.as_strided((slots // page_size, page_size, heads, dim), (stride * page_size, *buffer.stride()))


def fill(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    new_tokens: int,
    page_size: int,
    lengths: torch.Tensor,
    table: torch.Tensor,
    window_table: torch.Tensor | None = None,
    full_to_window: torch.Tensor | None = None,
) -> None:
    """Write this step's lengths and page tables.

    Args:
        req_to_token: [requests, tokens] int32. req_pool_indices: [B], the batch's rows of it.
        seq_lens: [B] integers, tokens in each cache; new_tokens more are counted (the draft tokens of a verification).
        lengths: [B] int32, out: their sums.
        table: [B, pages] int32, out; entries past a request's pages keep what they held.
        window_table, full_to_window: the same for the pool that a hybrid cache keeps for layers with a window, and
            its slot for every slot of the full pool (anything for slots that slid out, which no row sees).
    """
    if table.is_cuda:
        _fill_cuda(
            req_to_token, req_pool_indices, seq_lens, new_tokens, page_size, lengths, table, window_table,
            full_to_window,
        )  # fmt: skip
        return
    torch.add(seq_lens, new_tokens, out=lengths)
    longest = int(lengths.max()) if len(lengths) else 0
    width = min(-(-longest // page_size), table.shape[1])
    slots = req_to_token[req_pool_indices.long(), : width * page_size : page_size]
    table[:, :width] = slots // page_size
    if window_table is not None:
        window_table[:, :width] = full_to_window[slots.long()].clamp(min=0) // page_size


def _fill_cuda(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    new_tokens: int,
    page_size: int,
    lengths: torch.Tensor,
    table: torch.Tensor,
    window_table: torch.Tensor | None,
    full_to_window: torch.Tensor | None,
) -> None:
    batch = table.shape[0]
    if not batch:
        return
    _get_kernel()[(batch, _PROGRAMS)](
        req_to_token, req_pool_indices, seq_lens, lengths, table, window_table, full_to_window,
        req_to_token.stride(0), table.stride(0), table.shape[1], 0 if full_to_window is None else len(full_to_window),
        NEW_TOKENS=new_tokens, PAGE_SIZE=page_size, WINDOW=window_table is not None, BLOCK=_BLOCK, PROGRAMS=_PROGRAMS,
    )  # fmt: skip


@functools.cache
def _get_kernel():  # noqa: ANN202, a triton kernel
    from ._pages_kernel import fill_pages

    return fill_pages
