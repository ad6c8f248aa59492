"""Attention over a paged cache in float64: what decode and prefill are held to.

The textbook softmax of one request, head and row at a time (all visible keys at once: no tiles, no running maximum, no
partial results), on the stored, already quantised values. Slow on purpose and shared by nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..poison import bits

Scale = float | torch.Tensor | None


def _here(value: Any) -> Any:
    """``value`` on the CPU with the same bits where it is a tensor, of any strides."""
    return bits(value).cpu().view(value.dtype) if isinstance(value, torch.Tensor) else value


def gather(cache: torch.Tensor, page_table: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` tokens of one request as float64 [length, Hkv, D]; all on the CPU.

    cache: [pages, page_size, Hkv, D], any dtype and strides. page_table: the request's row, [max_pages].
    Only the slots of these tokens are read.
    """
    page_size = cache.shape[1]
    token = torch.arange(length)
    rows = bits(cache)[page_table.long()[token // page_size], token % page_size]
    return rows.view(cache.dtype).to(torch.float64)


def _key_scale(scale: Scale, page_table: torch.Tensor, length: int, heads: int) -> torch.Tensor:
    """k_scale of each of a request's tokens and heads, float64 [length, Hkv]."""
    if scale is None:
        return torch.ones(length, heads, dtype=torch.float64)
    if not isinstance(scale, torch.Tensor):
        return torch.full((length, heads), float(scale), dtype=torch.float64)
    if scale.dim() == 3:  # [pages, page_size, Hkv]
        return gather(scale.unsqueeze(-1), page_table, length).squeeze(-1)
    return scale.to(torch.float64).expand(heads).expand(length, heads)


def _head_scale(scale: Scale, heads: int) -> torch.Tensor:
    """v_scale of each head, float64 [Hkv]."""
    if scale is None:
        return torch.ones(heads, dtype=torch.float64)
    if not isinstance(scale, torch.Tensor):
        return torch.full((heads,), float(scale), dtype=torch.float64)
    return scale.to(torch.float64).expand(heads)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: Sequence[int],
    seq_lens: Sequence[int],
    *,
    sm_scale: float | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bottom-right causal attention of each request's newest tokens over its whole cache, in float64.

    Args:
        q: [T, Hq, D], any floating dtype. k_cache, v_cache: [pages, page_size, Hkv, D], any dtype and strides.
        page_table: [B, max_pages]. cu_seqlens_q: B + 1 starts of the requests' query rows, from 0 to T.
        seq_lens: tokens in each cache, the query's own included.
        sm_scale: of the scores (default D^-0.5). q_scale: [T, Hq]. k_scale: float, [1], [Hkv] or
        [pages, page_size, Hkv]. v_scale: float, [1] or [Hkv]. Scales multiply the stored values.
        softcap: c of c * tanh(s / c), after scaling. sinks: [Hq] logits that join the denominator only.
        window: keys a row sees, itself included; None for all.

    Row j of a request with n query rows sees the positions below seq_len - n + j + 1 (at most ``window`` of them).

    Returns:
        (out, lse): float64 [T, Hq, D] and [T, Hq] on the CPU; lse is the natural logarithm without the sinks. A row
        that sees nothing is zeros with lse -inf.
    """
    # Each tensor comes over once: where processes share a GPU, a copy for every request is a long wait for each.
    q, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens = map(
        _here, (q, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens)
    )
    q_scale, k_scale, v_scale, sinks = map(_here, (q_scale, k_scale, v_scale, sinks))
    tokens, num_q_heads, dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_q_heads // num_kv_heads
    scale = dim**-0.5 if sm_scale is None else float(sm_scale)
    queries = q.to(torch.float64)
    if q_scale is not None:
        queries = queries * q_scale.to(torch.float64).unsqueeze(-1)
    v_scales = _head_scale(v_scale, num_kv_heads)
    out = torch.zeros(tokens, num_q_heads, dim, dtype=torch.float64)
    lse = torch.full((tokens, num_q_heads), float("-inf"), dtype=torch.float64)
    for request, length in enumerate(int(n) for n in seq_lens):
        first, last = int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1])
        rows = last - first
        keys = gather(k_cache, page_table[request], length)
        keys = keys * _key_scale(k_scale, page_table[request], length, num_kv_heads).unsqueeze(-1)
        values = gather(v_cache, page_table[request], length) * v_scales.unsqueeze(-1)
        for row in range(rows):
            end = length - rows + row + 1
            begin = 0 if window is None else max(0, end - window)
            if end <= begin:
                continue
            for kv_head in range(num_kv_heads):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                scores = scale * queries[first + row, heads] @ keys[begin:end, kv_head].T  # [group, seen]
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                log_sum = torch.logsumexp(scores, 1)
                lse[first + row, heads] = log_sum
                if sinks is not None:
                    log_sum = torch.logaddexp(log_sum, sinks.to(torch.float64)[heads])
                out[first + row, heads] = torch.exp(scores - log_sum.unsqueeze(1)) @ values[begin:end, kv_head]
    return out, lse


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: Sequence[int] | torch.Tensor,
    q_len: int = 1,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``paged_attention`` of a decode step: q is [B * q_len, Hq, D], ``q_len`` rows a request; same options."""
    lengths = [int(n) for n in _here(seq_lens)]
    starts = [q_len * request for request in range(len(lengths) + 1)]
    return paged_attention(q, k_cache, v_cache, page_table, starts, lengths, **options)  # type: ignore[arg-type]
