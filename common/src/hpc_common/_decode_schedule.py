"""Reading and making decode task maps; ``hpc_common.schedule`` is the public name of what is here.

The layout of a map and the rules of the plan stand in ``include/hpc/schedule.hpp``, which host and device share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .checks import fail

TILE_TOKENS = 64
MAX_SEQ_LEN = 1 << 20
MAX_BATCH = 4096
MAX_CTAS = 1024

_HEADER_INTS = (
    "batch num_kv_heads num_ctas budget used_ctas num_splits q_len window max_seq_len max_batch batch_invariant "
    "num_empty floor min_tiles"
).split()
HEADER = np.dtype([("total_tiles", "<i8"), *((name, "<i4") for name in _HEADER_INTS)])
REQUEST = np.dtype(
    [
        (name, "<i4")
        for name in "tile_begin seq_len first_tile num_tiles piece_begin piece_tiles num_pieces next".split()
    ]
)
CTA = np.dtype([(name, "<i4") for name in "request kv_head tile count".split()])
SPLIT = np.dtype([(name, "<i4") for name in "request kv_head first_cta pieces".split()])
PIECE = np.dtype(
    [
        ("cta", "<i4"),
        ("request", "<i4"),
        ("kv_head", "<i4"),
        ("tile_begin", "<i4"),
        ("tile_end", "<i4"),
        ("slot", "<i8"),
        ("whole", "?"),
    ]
)


def map_bytes(max_batch: int, num_ctas: int) -> int:
    """Size of a map in bytes: header, max_batch + 1 request rows, num_ctas runs, num_ctas rows for cut pairs."""
    return HEADER.itemsize + (max_batch + 1) * REQUEST.itemsize + num_ctas * (CTA.itemsize + SPLIT.itemsize)


@dataclass(frozen=True, eq=False)
class DecodeSchedule:
    """One step's decode task map, parsed. Lengths in tokens, everything else in tiles of 64 tokens.

    raw: the map's bytes. Header: total_tiles (all requests and KV heads), batch, num_kv_heads, num_ctas, budget,
    used_ctas, num_splits, q_len, window (None: all keys), max_seq_len, max_batch, batch_invariant, num_empty (requests
    without tiles), floor, min_tiles.
    requests [batch + 1] (the last row ends the list), ctas [num_ctas], splits [num_splits]: structured arrays with the
    fields of ``schedule.hpp``.
    """

    raw: bytes
    total_tiles: int
    batch: int
    num_kv_heads: int
    num_ctas: int
    budget: int
    used_ctas: int
    num_splits: int
    q_len: int
    window: int | None
    max_seq_len: int
    max_batch: int
    batch_invariant: bool
    num_empty: int
    floor: int
    min_tiles: int
    requests: np.ndarray
    ctas: np.ndarray
    splits: np.ndarray

    @classmethod
    def from_map(cls, raw: bytes | bytearray | np.ndarray) -> "DecodeSchedule":
        """Parse a map: its bytes, or a uint8 array of them. ValueError where the size does not fit the header."""
        raw = bytes(raw)
        where = "hpc_common.DecodeSchedule.from_map"
        if len(raw) < HEADER.itemsize:
            fail(where, "raw", f"at least {HEADER.itemsize} bytes", len(raw))
        header = np.frombuffer(raw, HEADER, 1)[0]
        batch, max_batch, num_ctas = int(header["batch"]), int(header["max_batch"]), int(header["num_ctas"])
        if not (0 <= batch <= max_batch <= MAX_BATCH and 1 <= num_ctas <= MAX_CTAS):
            fail(where, "raw", "the header of a map", f"batch {batch}, max_batch {max_batch}, num_ctas {num_ctas}")
        if len(raw) != map_bytes(max_batch, num_ctas):
            fail(where, "raw", f"{map_bytes(max_batch, num_ctas)} bytes", len(raw))
        ctas_at = HEADER.itemsize + (max_batch + 1) * REQUEST.itemsize
        fields = {name: int(header[name]) for name in HEADER.names}
        fields["window"] = fields["window"] or None
        fields["batch_invariant"] = bool(fields["batch_invariant"])
        return cls(
            raw=raw,
            requests=np.frombuffer(raw, REQUEST, batch + 1, HEADER.itemsize),
            ctas=np.frombuffer(raw, CTA, num_ctas, ctas_at),
            splits=np.frombuffer(
                raw, SPLIT, min(max(fields["num_splits"], 0), num_ctas), ctas_at + num_ctas * CTA.itemsize
            ),
            **fields,
        )

    @cached_property
    def loads(self) -> np.ndarray:
        """Tiles of each CTA, int64 [num_ctas]."""
        return self.ctas["count"].astype(np.int64)

    @property
    def makespan(self) -> int:
        """The largest load."""
        return int(self.loads.max())

    @property
    def lower_bound(self) -> int:
        """Least makespan of any schedule on as many CTAs: ceil(total_tiles / num_ctas)."""
        return -(-self.total_tiles // self.num_ctas)

    @cached_property
    def pieces(self) -> np.ndarray:
        """Every piece in the order of CTAs, then of their work: a structured array with the fields of ``PIECE``.

        tile_begin and tile_end count from the request's first_tile. slot is where the piece's partial result lies,
        meaningless where ``whole`` says that the piece is all of its (request, head).
        """
        rows, heads = self.requests[: self.batch], self.num_kv_heads
        live = np.flatnonzero(rows["num_tiles"] > 0)
        request, head = np.repeat(live, heads), np.tile(np.arange(heads), len(live))
        size = rows["num_tiles"][request].astype(np.int64)
        begin = rows["tile_begin"][request].astype(np.int64) * heads + head * size  # of each (request, head)
        cuts = begin
        if self.batch_invariant:
            counts = rows["num_pieces"][request]
            cuts = np.repeat(begin, counts) + _ramp(counts) * np.repeat(rows["piece_tiles"][request], counts)
        cta = np.flatnonzero(self.ctas["count"] > 0)
        runs = self.ctas[cta]
        own = rows[runs["request"]]
        run_begin = own["tile_begin"].astype(np.int64) * heads + runs["kv_head"] * own["num_tiles"] + runs["tile"]
        run_end = run_begin + runs["count"]
        first = np.searchsorted(cuts, run_begin, "right")
        count = np.searchsorted(cuts, run_end, "left") - first + 1
        order = _ramp(count)
        after = np.repeat(first, count) + order  # index of the cut that ends a piece, unless its run ends before
        padded = np.append(cuts, self.total_tiles)
        piece_begin = np.where(order == 0, np.repeat(run_begin, count), padded[after - 1])
        piece_end = np.where(order == np.repeat(count, count) - 1, np.repeat(run_end, count), padded[after])
        unit = np.searchsorted(begin, piece_begin, "right") - 1
        result = np.zeros(len(unit), PIECE)
        result["cta"] = np.repeat(cta, count)
        result["request"], result["kv_head"] = request[unit], head[unit]
        result["tile_begin"], result["tile_end"] = piece_begin - begin[unit], piece_end - begin[unit]
        result["whole"] = piece_end - piece_begin == size[unit]
        if self.batch_invariant:
            row = rows[request[unit]]
            number = result["tile_begin"] // np.maximum(row["piece_tiles"], 1)
            result["slot"] = row["piece_begin"].astype(np.int64) * heads + head[unit] * row["num_pieces"] + number
        else:
            result["slot"] = 2 * result["cta"].astype(np.int64) + (order > 0)
        return result

    def cta_pieces(self, cta: int) -> np.ndarray:
        """The pieces of one CTA, in order: a slice of ``pieces``."""
        low, high = np.searchsorted(self.pieces["cta"], [cta, cta + 1])
        return self.pieces[low:high]

    def describe(self, limit: int = 16) -> str:
        """The map as text: the batch, the loads, and the first ``limit`` CTAs with their pieces."""
        pieces = self.pieces
        partial = pieces[~pieces["whole"]]
        cut = len(np.unique(partial[["request", "kv_head"]])) if len(partial) else 0
        kind = "batch-invariant pieces" if self.batch_invariant else f"budget {self.budget}, floor {self.floor}"
        window = "" if self.window is None else f", window {self.window}"
        lines = [
            f"{self.batch} requests ({self.num_empty} empty) x {self.num_kv_heads} KV heads, q_len {self.q_len}{window}"
            f": {self.total_tiles} tiles of {TILE_TOKENS} tokens",
            f"{self.used_ctas} of {self.num_ctas} CTAs, {kind}: largest load {self.makespan}, mean "
            f"{self.total_tiles / self.num_ctas:.1f}, lower bound {self.lower_bound}",
            f"{len(pieces)} pieces: {len(pieces) - len(partial)} whole, {len(partial)} of {cut} cut (request, head)s",
        ]
        for cta in np.flatnonzero(self.loads)[:limit]:
            own = self.cta_pieces(cta)
            texts = [f"r{p['request']} h{p['kv_head']} {_span(self, p)}" for p in own[:6]]
            more = f", {len(own) - 6} more" if len(own) > 6 else ""
            lines.append(f"CTA {cta:4d}: {self.loads[cta]:6d} tiles  {', '.join(texts)}{more}")
        if self.used_ctas > limit:
            lines.append(f"... {self.used_ctas - limit} CTAs more")
        return "\n".join(lines)


def _ramp(counts: np.ndarray) -> np.ndarray:
    """0 .. counts[0]-1, 0 .. counts[1]-1, ... joined, int64."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _span(schedule: DecodeSchedule, piece: Any) -> str:
    """A piece's tiles from position 0, with its slot where it is partial."""
    first = int(schedule.requests["first_tile"][piece["request"]])
    text = f"[{first + int(piece['tile_begin'])}, {first + int(piece['tile_end'])})"
    return text if piece["whole"] else f"{text} -> {piece['slot']}"


def _lengths(seq_lens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Lengths as int32; numbers beyond it become the nearest int32, which the planner clamps on."""
    info = np.iinfo(np.int32)
    return np.clip(np.asarray(seq_lens, np.int64).reshape(-1), info.min, info.max).astype(np.int32)


def plan_decode(
    seq_lens: Sequence[int] | np.ndarray,
    num_kv_heads: int = 1,
    num_ctas: int = 132,
    q_len: int = 1,
    window: int | None = None,
    max_seq_len: int = MAX_SEQ_LEN,
    batch_invariant: bool = False,
    max_batch: int | None = None,
    min_tiles: int = 2,
) -> DecodeSchedule:
    """The decode task map of a batch, made by the host planner.

    Args:
        seq_lens: tokens of each request, clamped to [0, max_seq_len]; at most 4,096 requests.
        num_kv_heads: KV heads. num_ctas: resident CTAs. q_len: query rows a request.
        window: keys a row sees, itself included; None: all.
        batch_invariant: cut each request by its own length alone.
        max_batch: request rows of the map, default the batch (at least 1).
        min_tiles: least tiles worth a CTA of its own (see ``floor_tiles`` in schedule.hpp).

    Raises ValueError for a value out of range.
    """
    from . import _core

    lengths = _lengths(seq_lens)
    rows = max(len(lengths), 1) if max_batch is None else max_batch
    return DecodeSchedule.from_map(
        _core.plan_host(
            lengths, num_kv_heads, q_len, window or 0, max_seq_len, num_ctas, batch_invariant, rows, min_tiles
        )
    )


@dataclass(frozen=True, eq=False)
class StaticSchedule:
    """A static split-KV schedule. loads: tiles each CTA slot runs, int64 [num_ctas]. makespan: the largest load.

    pieces: launched CTAs that have tiles; empty_pieces: launched CTAs that have none.
    """

    loads: np.ndarray
    makespan: int
    pieces: int
    empty_pieces: int


def static_split(
    seq_lens: Sequence[int] | np.ndarray,
    num_kv_heads: int = 1,
    num_ctas: int = 132,
    q_len: int = 1,
    window: int | None = None,
    max_seq_len: int = MAX_SEQ_LEN,
    *,
    splits: int | None = None,
    piece_tiles: int | None = None,
) -> StaticSchedule:
    """What a static split gives on the same batch: one CTA a piece, dispatched to the slot that frees first.

    Exactly one of the keywords: ``splits``, pieces of every (request, head) whatever its length; ``piece_tiles``, tiles
    of every piece, with a grid sized by the longest request. Other arguments as in ``plan_decode``; ValueError for a
    value out of range.
    """
    from . import _core

    loads, makespan, pieces, empty = _core.static_schedule(
        _lengths(seq_lens), num_kv_heads, q_len, window or 0, max_seq_len, num_ctas, splits or 0, piece_tiles or 0
    )
    return StaticSchedule(np.asarray(loads, np.int64), makespan, pieces, empty)
