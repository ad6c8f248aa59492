"""The invariants of a decode task map, checked from its bytes and the lengths alone.

Nothing here calls the planner: sums, clamps and cuts are done again in numpy, so a fault of the planner shows.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ._decode_schedule import HEADER, MAX_SEQ_LEN, REQUEST, TILE_TOKENS, DecodeSchedule, _ramp, map_bytes

_WAVE = 132  # SMs that the floor's rule spreads small work over


def expected_floor(total_tiles: int, num_ctas: int, min_tiles: int) -> int:
    """The floor of a CTA's work: one wave of 132 CTAs gets up to 2 * min_tiles each, and never less than min_tiles.

    Or, where that is more, the CTAs' share rounded up to a multiple of the least power of two of which it has at most
    8, if that adds at most 1/16 of it and it is at most 2^24.
    """
    if total_tiles <= _WAVE * min_tiles:
        return min_tiles
    least, share = min(-(-total_tiles // _WAVE), 2 * min_tiles), -(-total_tiles // num_ctas)
    step = 1 << (-(-share // 8) - 1).bit_length()
    rounded = -(-share // step) * step
    return max(least, rounded) if rounded - share <= share // 16 and share <= 1 << 24 else least


def expected_deal(tiles: np.ndarray, num_kv_heads: int, num_ctas: int, min_tiles: int) -> int:
    """Budget of a dealt plan, in which every (request, head) has CTAs of its own; 0 where the step has none.

    The least of the CTAs' share and 1/32 to 5/32 more (of 16 * min_tiles where that is more) for which there are CTAs
    enough. The share is at least min_tiles, and that of 66 CTAs where it is at most 4 * min_tiles, else 2 * min_tiles.
    Or the longest request's tiles, where they are at most a 36th of min_tiles times those CTAs more.
    """
    if not tiles.any() or not len(tiles) * num_kv_heads <= num_ctas <= 511:
        return 0
    total, longest = int(tiles.sum()) * num_kv_heads, int(tiles.max())
    least = max(-(-total // 66), min_tiles)
    share = max(-(-total // num_ctas), least if least <= 4 * min_tiles else 2 * min_tiles)
    for more in range(6):
        budget = share + -(-max(share, 16 * min_tiles) * more // 32)
        parts = int((-(-tiles // budget)).sum()) * num_kv_heads
        if parts <= num_ctas:
            return longest if longest - budget <= parts * min_tiles // 36 else budget
    return 0


def expected_weights(tiles: np.ndarray, num_kv_heads: int, num_ctas: int, min_tiles: int) -> np.ndarray | None:
    """What each request's pairs count on a weighed line: their tiles, and of more than 2 ``3 * min_tiles`` more.

    None where the line is not weighed: no more pairs than CTAs, few tiles, or cuts that fall on ends as it is.
    """
    total = int(tiles.sum()) * num_kv_heads
    share = -(-total // num_ctas)
    if len(tiles) * num_kv_heads <= num_ctas or not 3 * min_tiles < share <= 1 << 24:
        return None
    step = 1 << (-(-share // 8) - 1).bit_length()
    floor = expected_floor(total, num_ctas, min_tiles)
    if floor == min_tiles or (floor > 2 * min_tiles and not (tiles % step).any()):
        return None
    return np.where(tiles > 2, tiles + 3 * min_tiles, tiles)


def expected_couples(longest: int, batch: int, num_kv_heads: int, num_ctas: int, budget: int, min_tiles: int) -> bool:
    """Whether each request has two CTAs, 2i and 2i + 1, where the plan would have ``budget`` otherwise.

    57 to 66 requests of one head on 132 CTAs, as long as half of the longest is at most min_tiles more than that.
    """
    if num_kv_heads != 1 or num_ctas != 132 or not 57 <= batch <= 66:
        return False
    return longest > budget and -(-longest // 2) <= budget + min_tiles


def expected_piece_tiles(num_tiles: int) -> int:
    """Tiles of a piece in a batch-invariant plan: the least power of two from 8 on that leaves at most 256 pieces."""
    return max(8, 1 << (max(-(-num_tiles // 256), 1) - 1).bit_length())


def check_schedule(
    raw: bytes | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
    num_kv_heads: int = 1,
    num_ctas: int = 132,
    q_len: int = 1,
    window: int | None = None,
    max_seq_len: int = MAX_SEQ_LEN,
    batch_invariant: bool = False,
    max_batch: int | None = None,
    min_tiles: int = 2,
) -> list[str]:
    """What is wrong with a map: one text for each broken invariant, an empty list for a right one.

    Arguments as in ``plan_decode``; ``raw`` is the map's bytes. Checked: size, header and zero padding; the request
    rows; the budget; every (request, head, tile) run once and in order; loads; pieces dense, their number, and
    at most two partial ones a CTA; slots within the workspace and not shared; the list of cut (request, head) pairs.
    """
    raw = bytes(raw)
    lengths = np.clip(np.asarray(seq_lens, np.int64).reshape(-1), 0, max_seq_len)
    rows = max(len(lengths), 1) if max_batch is None else max_batch
    if len(raw) != map_bytes(rows, num_ctas):
        return [f"size: {len(raw)} bytes, not {map_bytes(rows, num_ctas)}"]
    given = dict(
        batch=len(lengths), num_kv_heads=num_kv_heads, num_ctas=num_ctas, q_len=q_len, window=window or 0,
        max_seq_len=max_seq_len, max_batch=rows, batch_invariant=int(batch_invariant), min_tiles=min_tiles,
    )  # fmt: skip
    header = np.frombuffer(raw, HEADER, 1)[0]
    wrong = [f"header: {name} {header[name]}, not {value}" for name, value in given.items() if header[name] != value]
    if wrong:  # the rest would be read at wrong offsets
        return wrong
    schedule = DecodeSchedule.from_map(raw)
    wrong = list(_requests(schedule, lengths)) + list(_loads(schedule)) + list(_padding(schedule))
    if not wrong:  # only then do runs and rows fit together well enough to list pieces
        wrong = list(_pieces(schedule))
    return wrong


def _requests(schedule: DecodeSchedule, lengths: np.ndarray) -> Iterator[str]:
    """The request rows, against what the lengths say."""
    last = -(-lengths // TILE_TOKENS)
    first = np.zeros_like(last)
    if schedule.window is not None:  # the first of the window keys that row 0 sees, the last of them included
        first = np.maximum(lengths - (schedule.q_len - 1) - schedule.window, 0) // TILE_TOKENS
    tiles = last - first
    want = np.zeros(len(lengths) + 1, REQUEST)
    want["seq_len"][:-1], want["first_tile"][:-1], want["num_tiles"][:-1] = lengths, first, tiles
    want["tile_begin"][1:] = np.cumsum(tiles)
    if schedule.batch_invariant:
        size = np.array([expected_piece_tiles(int(n)) if n else 0 for n in tiles], np.int64)
        pieces = -(-tiles // np.maximum(size, 1))
        want["piece_tiles"][:-1], want["num_pieces"][:-1] = size, pieces
        want["piece_begin"][1:] = np.cumsum(pieces)
    following = len(lengths)
    for request in range(len(lengths) - 1, -1, -1):
        want["next"][request] = following
        if tiles[request]:
            following = request
    for name in REQUEST.names:
        bad = np.flatnonzero(schedule.requests[name] != want[name])
        if len(bad):
            row = bad[0]
            yield f"request row {row}: {name} {schedule.requests[name][row]}, not {want[name][row]}"
    total = int(tiles.sum()) * schedule.num_kv_heads
    if schedule.total_tiles != total:
        yield f"header: total_tiles {schedule.total_tiles}, not {total}"
    if schedule.num_empty != np.count_nonzero(tiles == 0):
        yield f"header: num_empty {schedule.num_empty}, not {np.count_nonzero(tiles == 0)}"


def _loads(schedule: DecodeSchedule) -> Iterator[str]:
    """Budget, and the runs of the CTAs: in range, in order, without gap or overlap, of the right length."""
    total, n = schedule.total_tiles, schedule.num_ctas
    floor = expected_floor(total, n, schedule.min_tiles)
    budget = max(-(-total // n), floor) if total else 0
    tiles = schedule.requests["num_tiles"][: schedule.batch].astype(np.int64)
    dealt = 0 if schedule.batch_invariant else expected_deal(tiles, schedule.num_kv_heads, n, schedule.min_tiles)
    if dealt:
        floor = budget = dealt
    weights = (
        None
        if dealt or schedule.batch_invariant
        else expected_weights(tiles, schedule.num_kv_heads, n, schedule.min_tiles)
    )
    if weights is not None:
        floor, budget = 2 * schedule.min_tiles, -(-int(weights.sum()) * schedule.num_kv_heads // n)
    longest = int(tiles.max(initial=0))
    couples = not schedule.batch_invariant and expected_couples(
        longest, len(tiles), schedule.num_kv_heads, n, budget, schedule.min_tiles
    )
    if couples:
        floor = budget = dealt = -(-longest // 2)
    if (schedule.floor, schedule.budget) != (floor, budget):
        yield f"header: floor and budget {schedule.floor}, {schedule.budget}, not {floor}, {budget}"
    runs = schedule.ctas
    used = runs["count"] > 0
    if schedule.used_ctas != np.count_nonzero(used):
        yield f"header: used_ctas {schedule.used_ctas}, not {np.count_nonzero(used)}"
    if (runs["count"] < 0).any() or runs[~used].tobytes().strip(b"\0"):
        yield "ctas: a run without tiles that is not zero"
    cta = np.flatnonzero(used)
    runs = runs[used]
    rows = schedule.requests[: schedule.batch]
    inside = (runs["request"] >= 0) & (runs["request"] < schedule.batch)
    inside &= (runs["kv_head"] >= 0) & (runs["kv_head"] < schedule.num_kv_heads) & (runs["tile"] >= 0)
    if inside.all():
        inside = runs["tile"] < rows["num_tiles"][runs["request"]]
    if not inside.all():
        yield f"CTA {cta[~inside][0]}: a run that begins outside the requests, heads and tiles there are"
        return
    own = rows[runs["request"]]
    begin = own["tile_begin"].astype(np.int64) * schedule.num_kv_heads
    begin += runs["kv_head"].astype(np.int64) * own["num_tiles"] + runs["tile"]
    end = begin + runs["count"]
    edges = np.append(begin, total)
    gap = np.flatnonzero(np.append(0, end) != edges)
    if len(gap):
        yield f"tiles {np.append(0, end)[gap[0]]} and {edges[gap[0]]}: covered twice, or not at all, between them"
    if schedule.batch_invariant:
        return  # how much a CTA gets follows from the pieces, checked there
    if dealt:
        parts = np.repeat(np.minimum(tiles, 2) if couples else -(-tiles // budget), schedule.num_kv_heads)
        own = np.repeat(tiles, schedule.num_kv_heads)
        first = 2 * np.arange(len(parts)) if couples else np.cumsum(parts) - parts
        number, first, own, parts = _ramp(parts), *(np.repeat(of, parts) for of in (first, own, parts))
        if not np.array_equal(cta, first + number):
            yield f"loads: not the {len(parts)} CTAs that the requests should have"
        elif not np.array_equal(runs["count"], own // parts + (number < own % parts)):
            yield "loads: a CTA without its even share of one (request, head)"
        return
    if weights is not None:
        pair_weights, pair_tiles = np.repeat(weights, schedule.num_kv_heads), np.repeat(tiles, schedule.num_kv_heads)
        line = np.append(0, np.cumsum(pair_weights))
        at = np.arange(n) * budget
        at = at[at < line[-1]]
        pair = np.searchsorted(line, at, "right") - 1
        inside = np.maximum(at - line[pair] - (pair_weights - pair_tiles)[pair], 0)
        if not np.array_equal(begin, np.append(0, np.cumsum(pair_tiles))[pair] + inside):
            yield f"loads: a CTA that does not begin at its number times {budget} of the weighed line"
        return
    if not np.array_equal(begin, cta * budget) or (runs["count"][:-1] != budget).any():
        yield f"loads: a CTA that does not run the tiles from its number times {budget}"
    if schedule.makespan != min(budget, total):
        yield f"loads: makespan {schedule.makespan}, not {min(budget, total)}"


def _padding(schedule: DecodeSchedule) -> Iterator[str]:
    """Zero bytes behind the request rows and behind the cut pairs."""
    begin = HEADER.itemsize + (schedule.batch + 1) * REQUEST.itemsize
    end = HEADER.itemsize + (schedule.max_batch + 1) * REQUEST.itemsize
    if schedule.raw[begin:end].strip(b"\0"):
        yield "padding: a byte behind the request rows is not zero"
    if not 0 <= schedule.num_splits < schedule.num_ctas:
        yield f"header: num_splits {schedule.num_splits} with {schedule.num_ctas} CTAs"
        return
    end = len(schedule.raw)
    if schedule.raw[end - (schedule.num_ctas - schedule.num_splits) * 16 : end].strip(b"\0"):
        yield "padding: a byte behind the cut pairs is not zero"


def _pieces(schedule: DecodeSchedule) -> Iterator[str]:
    """Pieces dense within each (request, head), few enough, slots apart, and the list of cut pairs."""
    pieces, heads = schedule.pieces, schedule.num_kv_heads
    size = schedule.requests["num_tiles"][pieces["request"]]
    pair = pieces["request"].astype(np.int64) * heads + pieces["kv_head"]
    starts, ends = pieces["tile_begin"] == 0, pieces["tile_end"] == size
    joined = (pair[1:] == pair[:-1]) & (pieces["tile_begin"][1:] == pieces["tile_end"][:-1])
    if len(pieces) and not (starts[0] and ends[-1] and np.where(ends[:-1], starts[1:], joined).all()):
        yield "pieces: those of a (request, head) do not follow each other from its first tile to its last"
        return
    pairs = int(np.count_nonzero(schedule.requests["num_tiles"][: schedule.batch])) * heads
    if np.count_nonzero(starts) != pairs:
        yield f"pieces: {np.count_nonzero(starts)} (request, head) pairs begun, not {pairs}"
    partial = pieces[~pieces["whole"]]
    if len(np.unique(partial["slot"])) != len(partial):
        yield "slots: two partial results share one"
    if schedule.batch_invariant:
        yield from _invariant_pieces(schedule)
        return
    if len(pieces) and len(pieces) > schedule.used_ctas - 1 + pairs:
        yield f"pieces: {len(pieces)} for {schedule.used_ctas} CTAs and {pairs} pairs"
    if len(partial) and (partial["slot"].min() < 0 or partial["slot"].max() >= 2 * schedule.num_ctas):
        yield f"slots: one outside [0, {2 * schedule.num_ctas})"
    if (np.bincount(partial["cta"], minlength=1) > 2).any():
        yield "pieces: a CTA with more than two partial ones"
    cut, first, count = np.unique(pair[~pieces["whole"]], return_index=True, return_counts=True)
    want = np.stack([cut // heads, cut % heads, partial["cta"][first], count], 1) if len(cut) else np.zeros((0, 4))
    have = schedule.splits.view("<i4").reshape(-1, 4)
    if have.shape != want.shape or (have != want).any():
        yield f"splits: not the {len(want)} cut (request, head) pairs in order, with first CTA and number of pieces"


def _invariant_pieces(schedule: DecodeSchedule) -> Iterator[str]:
    """Batch-invariant plans: cuts from the request's own tiles, run by the CTA whose budget holds the piece's start."""
    pieces, heads = schedule.pieces, schedule.num_kv_heads
    rows = schedule.requests[pieces["request"]]
    if (pieces["tile_begin"] % np.maximum(rows["piece_tiles"], 1)).any():
        yield "pieces: one that does not begin at a multiple of its request's piece size"
    want = np.minimum(pieces["tile_begin"] + rows["piece_tiles"], rows["num_tiles"])
    if (pieces["tile_end"] != want).any():
        yield "pieces: one that is neither of its request's piece size nor the last"
    begin = rows["tile_begin"].astype(np.int64) * heads + pieces["kv_head"] * rows["num_tiles"] + pieces["tile_begin"]
    if schedule.budget and (begin // schedule.budget != pieces["cta"]).any():
        yield "pieces: one that begins outside the budget of the CTA that runs it"
    slots = int(schedule.requests["piece_begin"][schedule.batch]) * heads
    if not np.array_equal(pieces["slot"], np.arange(slots)):
        yield f"slots: not 0 to {slots - 1} in order"
    if schedule.num_splits:
        yield f"splits: {schedule.num_splits} rows in a batch-invariant plan"
