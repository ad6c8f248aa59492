"""Decode and prefill on a CPU, in fp32.

Decode follows the task map exactly as the GPU kernel does: every CTA's run of tiles is cut into pieces of one
(request, KV head); a piece that is a whole (request, head) writes its output, any other a partial output with its
log-sum-exp into the plan's workspace, and the partials of each (request, head) are then combined in the order of the
map (Rabe and Staats, arXiv:2112.05682; the split over the keys is Flash-Decoding's). Only slots that hold a token some
row sees are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hpc_common.schedule import TILE_TOKENS, DecodeSchedule

NEG_INF = float("-inf")
_AS_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# The value of every e4m3 code: a gather from it is several times faster than torch's conversion on a CPU.
_E4M3 = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(torch.float32)


@dataclass(frozen=True)
class Options:
    """What is the same for every piece of a call. Scales and sinks fp32; k_scale 1-D or [pages, page_size, Hkv]."""

    sm_scale: float
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    v_factor: float
    sinks: torch.Tensor | None
    softcap: float  # 0: none


@dataclass(frozen=True)
class Cache:
    """One of a paged cache's two halves with its page table; reads tokens of one request and head."""

    data: torch.Tensor  # [pages, page_size, Hkv, D] or [pages, page_size, Hkv] (scales)
    page_table: torch.Tensor  # [B, max_pages] int32

    def read(self, request: int, head: int, begin: int, end: int) -> torch.Tensor:
        """Tokens [begin, end) of a request and KV head, fp32 [end - begin, ...], freshly allocated."""
        page_size = self.data.shape[1]
        first = begin // page_size
        pages = self.page_table[request, first : -(-end // page_size)].long()
        # As integers: torch gathers rows of those for every dtype, e4m3 included.
        plane = self.data.view(_AS_INT[self.data.element_size()]).select(2, head)
        if page_size == 1:
            rows = plane[:, 0].index_select(0, pages)
        else:
            rows = plane.index_select(0, pages).flatten(0, 1)[begin - first * page_size : end - first * page_size]
        if rows.dtype == torch.uint8:
            return _E4M3.index_select(0, rows.flatten().to(torch.int32)).view(rows.shape)
        return rows.view(self.data.dtype).to(torch.float32)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    begin: int,
    row_begin: torch.Tensor,
    row_end: torch.Tensor,
    key_scale: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of some rows over consecutive tokens of one request and head.

    query: fp32 [rows, D]. keys, values: fp32 [n, D], the tokens from position ``begin``. row_begin, row_end: int64
    [rows], the positions a row sees. key_scale: [n], [1] or None.
    Returns (out [rows, D], lse [rows]) in fp32; zeros and -inf where a row sees none of these tokens.
    """
    scores = query @ keys.T
    scores *= options.sm_scale
    if key_scale is not None:
        scores *= key_scale
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    end = begin + len(keys)
    if int(row_begin.max()) > begin or int(row_end.min()) < end:
        position = torch.arange(begin, end, device="cpu")
        seen = (position >= row_begin.unsqueeze(1)) & (position < row_end.unsqueeze(1))
        scores = scores.masked_fill(~seen, NEG_INF)
    largest = scores.amax(1, keepdim=True) if len(keys) else scores.new_full((len(query), 1), NEG_INF)
    # A row that sees nothing has no maximum; 0 in its place gives weights exp(-inf) = 0 and not NaN.
    weights = torch.exp_(scores - largest.masked_fill(largest == NEG_INF, 0.0))
    total = weights.sum(1, keepdim=True)
    out = (weights @ values) / total.masked_fill(total == 0, 1.0)
    return out, (largest + torch.log(total)).squeeze(1)


def combine(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join partial results of the same rows over disjoint keys: outs [pieces, rows, D], lses [pieces, rows], fp32.

    The global softmax's weights of the pieces are exp(lse_i - lse); sums run in the order of the pieces.
    """
    largest = lses.amax(0)
    weights = torch.exp(lses - largest.masked_fill(largest == NEG_INF, 0.0))
    total = weights.sum(0)
    out = (weights.unsqueeze(-1) * outs).sum(0) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out, largest + torch.log(total)


class Rows:
    """The query rows of one request and KV head inside q, out and lse: [n, group, ...] seen as [n * group, ...]."""

    def __init__(
        self,
        q: torch.Tensor,
        q_scale: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        num_kv_heads: int,
        options: Options,
    ) -> None:
        self.q, self.q_scale, self.out, self.lse, self.options = q, q_scale, out, lse, options
        self.group = q.shape[1] // num_kv_heads

    def query(self, first: int, count: int, head: int) -> torch.Tensor:
        """fp32 [count * group, D], row j * group + g being token first + j, query head head * group + g."""
        heads = slice(head * self.group, (head + 1) * self.group)
        rows = self.q[first : first + count, heads].to(torch.float32)
        if self.q_scale is not None:
            rows = rows * self.q_scale[first : first + count, heads].unsqueeze(-1)
        return rows.flatten(0, 1)

    def write(self, first: int, count: int, head: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """The final result of these rows: sinks join the denominator, v_scale multiplies, one rounding."""
        heads = slice(head * self.group, (head + 1) * self.group)
        shape = (count, self.group)
        if self.lse is not None:
            self.lse[first : first + count, heads] = lse.view(shape)
        if self.options.sinks is not None:
            joined = torch.logaddexp(lse.view(shape), self.options.sinks[heads]).flatten()
            share = torch.exp(lse - joined).masked_fill(lse == NEG_INF, 0.0)
            out = out * share.unsqueeze(1)
        if self.options.v_scale is not None:
            scale = self.options.v_scale
            out = out * (scale[head] if len(scale) > 1 else scale)
        elif self.options.v_factor != 1:
            out = out * self.options.v_factor
        self.out[first : first + count, heads] = out.view(*shape, -1).to(self.out.dtype)


def _key_scale(
    options: Options, cache: Cache | None, request: int, head: int, begin: int, end: int
) -> torch.Tensor | None:
    if cache is not None:
        return cache.read(request, head, begin, end)
    scale = options.k_scale
    return None if scale is None else scale[head] if len(scale) > 1 else scale


def read_map(plan_map: torch.Tensor) -> DecodeSchedule:
    """A plan's map tensor (on the CPU), parsed."""
    return DecodeSchedule.from_map(plan_map.view(torch.uint8).numpy())


def combines(schedule: DecodeSchedule) -> Iterator[tuple[int, int, list[int]]]:
    """Every cut (request, head) with the slots of its pieces, in the order of the keys; from the map's own rows."""
    heads = schedule.num_kv_heads
    if schedule.batch_invariant:
        for request, row in enumerate(schedule.requests[:-1]):
            count = int(row["num_pieces"])
            for head in range(heads if count > 1 else 0):
                first = heads * int(row["piece_begin"]) + head * count
                yield request, head, list(range(first, first + count))
        return
    for request, head, first_cta, pieces in schedule.splits.tolist():
        first = schedule.ctas[first_cta]
        slots = [2 * cta for cta in range(first_cta, first_cta + pieces)]
        slots[0] += (first["request"], first["kv_head"]) != (request, head)  # it begins inside its first CTA's run
        yield request, head, slots


def partials(workspace: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    """The workspace as fp32 [slots, rows, D + 1]: a partial output and, last, its log-sum-exp."""
    words = workspace.view(-1).view(torch.uint8)
    slots = words.numel() // (4 * rows * (dim + 1))
    return words[: slots * rows * (dim + 1) * 4].view(torch.float32).view(slots, rows, dim + 1)


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    schedule: DecodeSchedule,
    workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    options: Options,
) -> None:
    """Attention of one decode step by the task map, into ``out`` and ``lse``; arguments are checked by the caller."""
    rows = Rows(q, q_scale, out, lse, schedule.num_kv_heads, options)
    keys, values = Cache(k_cache, page_table), Cache(v_cache, page_table)
    per_token = options.k_scale is not None and options.k_scale.dim() == 3
    scales = Cache(options.k_scale, page_table) if per_token else None
    q_len, window = schedule.q_len, schedule.window
    parts = partials(workspace, q_len * rows.group, q.shape[2])
    # Which of the request's new tokens a row is.
    offsets = torch.arange(q_len, device="cpu").repeat_interleave(rows.group)
    lengths, first_tiles = schedule.requests["seq_len"].tolist(), schedule.requests["first_tile"].tolist()
    for request in (schedule.requests["num_tiles"][:-1] == 0).nonzero()[0].tolist():
        out[request * q_len : (request + 1) * q_len] = 0
        if lse is not None:
            lse[request * q_len : (request + 1) * q_len] = NEG_INF
    for _, request, head, first, last, slot, whole in schedule.pieces.tolist():
        length, skipped = lengths[request], first_tiles[request]
        row_end = offsets + (length - q_len + 1)
        row_begin = (row_end - window).clamp(min=0) if window else torch.zeros_like(row_end)
        begin = max((skipped + first) * TILE_TOKENS, int(row_begin[0]))
        end = min((skipped + last) * TILE_TOKENS, length)
        result, log_sum = attend(
            rows.query(request * q_len, q_len, head),
            keys.read(request, head, begin, end),
            values.read(request, head, begin, end),
            begin,
            row_begin,
            row_end,
            _key_scale(options, scales, request, head, begin, end),
            options,
        )
        if whole:
            rows.write(request * q_len, q_len, head, result, log_sum)
        else:
            parts[slot, :, :-1] = result
            parts[slot, :, -1] = log_sum
    for request, head, slots in combines(schedule):
        pieces = parts[slots]
        rows.write(request * q_len, q_len, head, *combine(pieces[..., :-1], pieces[..., -1]))


# Scores held at once by prefill: 64 MB of fp32.
_PREFILL_SCORES = 1 << 24


def prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    starts: list[int],
    lengths: list[int],
    window: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    options: Options,
) -> None:
    """Attention of each request's new tokens over its cache, a block of query tokens at a time."""
    rows = Rows(q, None, out, lse, k_cache.shape[2], options)
    keys, values = Cache(k_cache, page_table), Cache(v_cache, page_table)
    per_token = options.k_scale is not None and options.k_scale.dim() == 3
    scales = Cache(options.k_scale, page_table) if per_token else None
    for request, length in enumerate(lengths):
        first, new = starts[request], starts[request + 1] - starts[request]
        block = max(1, _PREFILL_SCORES // (rows.group * max(length, 1)))
        for head in range(k_cache.shape[2]):
            for row in range(0, new, block):
                count = min(block, new - row)
                new_tokens = torch.arange(row, row + count, device="cpu").repeat_interleave(rows.group)
                row_end = new_tokens + (length - new + 1)
                row_begin = (row_end - window).clamp(min=0) if window else torch.zeros_like(row_end)
                end = max(int(row_end[-1]), 0)
                begin = min(int(row_begin[0]), end)
                result, log_sum = attend(
                    rows.query(first + row, count, head),
                    keys.read(request, head, begin, end),
                    values.read(request, head, begin, end),
                    begin,
                    row_begin,
                    row_end,
                    _key_scale(options, scales, request, head, begin, end),
                    options,
                )
                rows.write(first + row, count, head, result, log_sum)
