"""The decode scheduler: every invariant over random batches, and a planner written again the slow way."""

import itertools

import numpy as np
import pytest
from hpc_common import _core
from hpc_common._decode_check import expected_weights
from hpc_common.lengths import parse_lengths
from hpc_common.reference.schedule import slow_plan
from hpc_common.schedule import DecodeSchedule, check_schedule, plan_decode, static_split
from hpc_common.strategies import lengths, shapes
from hypothesis import assume, given
from hypothesis import strategies as st

# Batch-invariant plans have up to 256 pieces a (request, head): bounded so that an example lists under 10^5 of them.
INVARIANT = dict(batch=lengths(max_batch=64), shape=shapes(max_heads=4, batch_invariant=True))
# Small enough to list every tile.
SMALL = dict(batch=lengths(max_batch=20, max_len=2000), shape=shapes(max_heads=3, max_ctas=40))


@given(lengths(), shapes(batch_invariant=False), st.integers(0, 3))
def test_invariants(batch, shape, spare):
    rows = min(max(len(batch), 1) + spare, 4096)
    schedule = plan_decode(batch, max_batch=rows, **shape)
    assert check_schedule(schedule.raw, batch, max_batch=rows, **shape) == []


@given(**INVARIANT)
def test_invariants_batch_invariant(batch, shape):
    schedule = plan_decode(batch, **shape)
    assert check_schedule(schedule.raw, batch, **shape) == []


@given(**SMALL)
def test_equals_slow_planner(batch, shape):
    runs, pieces = slow_plan(batch, **shape)
    schedule = plan_decode(batch, **shape)
    assert {cta: int(load) for cta, load in enumerate(schedule.loads) if load} == {c: len(r) for c, r in runs.items()}
    first = schedule.requests["first_tile"][schedule.pieces["request"]]
    have = schedule.pieces
    listed = zip(
        have["cta"], have["request"], have["kv_head"], first + have["tile_begin"], first + have["tile_end"], strict=True
    )
    assert [tuple(map(int, piece)) for piece in listed] == pieces
    rows = [(int(s["request"]), int(s["kv_head"]), int(s["first_cta"]), int(s["pieces"])) for s in schedule.splits]
    cut = {}
    for cta, request, head, *_ in pieces:
        cut.setdefault((request, head), []).append(cta)
    assert rows == [
        (*pair, ctas[0], len(ctas)) for pair, ctas in cut.items() if len(ctas) > 1 and not shape["batch_invariant"]
    ]


@pytest.mark.parametrize("q_len", range(1, 9))
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 127, 128, 129, 200, None])
def test_tiles_are_those_some_row_sees(window, q_len):
    """Every length to 300, row by row and position by position."""
    rows = plan_decode(range(301), window=window, q_len=q_len).requests
    for length in range(301):
        ends = range(max(length - q_len + 1, 0), length + 1)
        seen = {p // 64 for end in ends for p in range(0 if window is None else max(0, end - window), end)}
        tiles = range(rows["first_tile"][length], rows["first_tile"][length] + rows["num_tiles"][length])
        assert set(tiles) == seen, length


@given(**SMALL)
def test_cursor_lists_the_same_pieces(batch, shape):
    schedule = plan_decode(batch, **shape)
    assert _core.map_pieces(schedule.raw) == schedule.pieces.tolist()


def weights(schedule):
    """What each request's pairs count on the schedule's line where that is weighed, else None."""
    tiles = schedule.requests["num_tiles"][:-1].astype(np.int64)
    return expected_weights(tiles, schedule.num_kv_heads, schedule.num_ctas, schedule.min_tiles)


# More pairs than CTAs, many tiles a CTA.
MANY = dict(
    batch=st.lists(st.integers(0, 4000), min_size=10, max_size=60),
    shape=st.fixed_dictionaries(dict(
        num_kv_heads=st.integers(1, 3), num_ctas=st.integers(1, 12), q_len=st.just(1), max_seq_len=st.just(3500),
        window=st.sampled_from([None, 300]), batch_invariant=st.just(False), min_tiles=st.integers(1, 3),
    )),
)  # fmt: skip


@given(**MANY)
def test_weighed_lines(batch, shape):
    """The invariants, the slow planner's map, and what weights are for: no CTA costs much more than others."""
    schedule = plan_decode(batch, **shape)
    assert check_schedule(schedule.raw, batch, **shape) == []
    runs, pieces = slow_plan(batch, **shape)
    assert {cta: int(load) for cta, load in enumerate(schedule.loads) if load} == {c: len(r) for c, r in runs.items()}
    assert len(pieces) == len(schedule.pieces)
    if weights(schedule) is None:
        return
    extra = 3 * shape["min_tiles"]
    begun = schedule.pieces[schedule.pieces["tile_begin"] == 0]
    long = schedule.requests["num_tiles"][begun["request"]] > 2
    cost = schedule.loads + extra * np.bincount(begun["cta"][long], minlength=shape["num_ctas"])
    assert cost.max() <= schedule.budget + extra


@given(
    st.integers(55, 68), st.integers(200, 5000), st.integers(0, 80), st.integers(1, 2), st.sampled_from([None, 1500]),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_couples(batch, longest, spread, min_tiles, window, random):
    """One head on 132 CTAs, of alike and of uneven lengths: the invariants, and the slow planner's map."""
    drawn = [random.randint(longest * (100 - spread) // 100, longest) for _ in range(batch)]
    drawn[random.randrange(batch)] = random.choice([0, 1, 65, longest])
    shape = dict(num_kv_heads=1, num_ctas=132, q_len=1, window=window, max_seq_len=4500, min_tiles=min_tiles)
    schedule = plan_decode(drawn, **shape)
    assert check_schedule(schedule.raw, drawn, **shape) == []
    runs, pieces = slow_plan(drawn, batch_invariant=False, **shape)
    assert {cta: int(load) for cta, load in enumerate(schedule.loads) if load} == {c: len(r) for c, r in runs.items()}
    assert list(map(tuple, schedule.pieces[["cta", "request", "kv_head"]].tolist())) == [piece[:3] for piece in pieces]


@given(lengths(max_batch=300, max_len=1 << 17), shapes(max_heads=4, batch_invariant=False), st.data())
def test_makespan_against_bounds_and_static_splits(batch, shape, data):
    schedule = plan_decode(batch, **shape)
    total = schedule.total_tiles
    assert schedule.lower_bound == -(-total // shape["num_ctas"])
    assert schedule.makespan <= min(schedule.budget, total)
    if weights(schedule) is not None:
        return
    if len(batch) * shape["num_kv_heads"] > shape["num_ctas"]:  # no dealt plan
        assert schedule.makespan == min(schedule.budget, total)
    least, ctas = shape["min_tiles"], shape["num_ctas"]
    share = max(schedule.lower_bound, 2 * least)
    assert schedule.makespan <= share + -(-max(share, 16 * least) * 5 // 32) + min(ctas, 511) * least // 36
    if schedule.lower_bound < schedule.floor:
        return
    assert schedule.makespan == schedule.lower_bound
    static = {k: v for k, v in shape.items() if k not in ("batch_invariant", "min_tiles")}
    for choice in (dict(splits=data.draw(st.integers(1, 64))), dict(piece_tiles=data.draw(st.integers(1, 512)))):
        other = static_split(batch, **static, **choice)
        assert int(other.loads.sum()) == total and other.makespan == other.loads.max(initial=0)
        assert schedule.makespan <= other.makespan


@given(lengths(max_batch=100, max_len=1 << 17), shapes(max_heads=4, batch_invariant=False), st.randoms())
def test_permuting_requests_keeps_loads_and_coverage(batch, shape, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    one, other = plan_decode(batch, **shape), plan_decode([batch[i] for i in order], **shape)
    assert weights(one) is not None or np.array_equal(np.sort(one.loads), np.sort(other.loads))
    assert check_schedule(other.raw, [batch[i] for i in order], **shape) == []
    assert np.array_equal(one.requests["num_tiles"][order], other.requests["num_tiles"][:-1])


@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 16), st.integers(1, 16))
def test_equal_requests_stay_whole(tiles, each, ctas, heads):
    """Requests whose tiles divide the budget are never cut: no partial result, nothing to combine."""
    assume(ctas * each % heads == 0)
    batch = [tiles * 64] * (ctas * each // heads)
    assert plan_decode(batch, heads, ctas, min_tiles=tiles * each).budget == tiles * each
    for min_tiles in (1, tiles * each):  # a share that is rounded up may be no multiple
        schedule = plan_decode(batch, heads, ctas, min_tiles=min_tiles)
        if schedule.budget % tiles == 0:
            assert schedule.pieces["whole"].all() and schedule.num_splits == 0


@given(st.integers(0, 1 << 20), lengths(max_batch=20), lengths(max_batch=20), shapes(max_heads=2, batch_invariant=True))
def test_batch_invariant_pieces_depend_on_the_own_length_alone(length, before, after, shape):
    alone, beside = plan_decode([length], **shape), plan_decode([*before, length, *after], **shape)
    cuts = ("kv_head", "tile_begin", "tile_end", "whole")
    mine = beside.pieces[beside.pieces["request"] == len(before)]
    assert all(np.array_equal(alone.pieces[name], mine[name]) for name in cuts)


@pytest.mark.parametrize("min_tiles", [1, 2, 3, 8])
def test_floor_and_piece_size_at_every_total(min_tiles):
    """The two rules, number by number: a wave of 132 CTAs; powers of two from 8 that leave at most 256 pieces."""
    totals = [*range(132 * 2 * min_tiles + 300), *range(3000, 70000, 61), 1 << 31, 1 << 33, 4096 * 16384 * 128]
    for total, ctas in itertools.product(totals, (132, 78)):
        want = next((n for n in range(min_tiles, 2 * min_tiles) if n * 132 >= total), 2 * min_tiles)
        share = -(-total // ctas)
        if total > 132 * min_tiles and share <= 1 << 24:  # up to 1/16 more
            step = next(n for n in (2**k for k in range(40)) if 8 * n >= share)
            want = max(want, next((n for n in range(share, share + share // 16 + 1) if n % step == 0), 0))
        assert _core.floor_tiles(total, ctas, min_tiles) == want, total
    for tiles in range(1, 16385):
        assert _core.piece_tiles(tiles) == next(n for n in (8, 16, 32, 64) if n * 256 >= tiles), tiles


@pytest.mark.parametrize(
    ("batch", "heads", "budget"),
    [
        ([4096] * 64, 1, 32),
        ([131072] + [4096] * 31, 1, 32),  # 31 would be even
        ([4096] * 31 + [131072], 1, 32),
        ([2048] * 2 + [256] * 350, 1, 12),  # 11.1
        ([4096] * 64, 8, 256),  # 249
        ([8192] * 20, 8, 160),  # 156
        ([65536] + [4096] * 15, 8, 128),  # 121
        ([4096] * 70, 1, 34),  # 40 would be 18 % more
    ],
)
def test_a_little_more_for_cuts_at_the_ends_of_requests(batch, heads, budget):
    schedule = plan_decode(batch, heads)
    assert schedule.budget == budget
    assert schedule.makespan - schedule.lower_bound <= schedule.lower_bound // 16


@pytest.mark.parametrize(
    ("batch", "heads", "ctas", "min_tiles", "parts"),
    [
        ([512] * 64, 1, 132, 2, [1] * 64),  # 4 tiles would be even, up to 11 are whole
        ([512] * 64, 1, 132, 1, [2] * 64),  # up to 7
        ([960] * 64, 1, 132, 2, [1] * 64),
        ([1024] * 64, 1, 132, 2, [2] * 64),
        ([512], 1, 132, 2, [4]),  # the floor is 2
        ([8320], 1, 132, 2, [65]),  # 2 a CTA on up to 66
        ([33792], 1, 132, 2, [66]),  # up to 8
        ([33793], 1, 132, 2, [106]),  # then as many as there are
        ([32768] * 2 + [4096] * 30, 1, 132, 2, [21] * 2 + [3] * 30),  # 23 would be even, 25 fit
        ([131072] + [4096] * 31, 1, 132, 1, [64] + [2] * 31),  # 31 and 32
        ([8192] * 8, 8, 132, 2, [2] * 8),
        ([320, 640, 1, 0], 2, 8, 2, [1, 2, 1, 0]),
        ([0, 8192, 0, 256, 0], 2, 10, 2, [0, 4, 0, 1, 0]),  # 27 would be even, 32 fit
        ([0, 8192, 0, 256, 0], 2, 10, 1, [0, 4, 0, 1, 0]),  # 5/32 of 27, rounded up
        ([128] * 34 + [256], 1, 132, 2, [1] * 35),  # as much as 36 parts may cost
        ([0, 8512, 0, 256, 0], 2, 10, 2, None),  # of 28, 34 would fit: too much
        ([512] * 64, 8, 511, 2, None),  # more pairs than CTAs
        ([512] * 40, 8, 512, 2, None),  # more CTAs than a dealt plan has
        ([512] * 40, 8, 511, 2, [1] * 40),
    ],
)
def test_pairs_with_ctas_of_their_own(batch, heads, ctas, min_tiles, parts):
    schedule = plan_decode(batch, heads, ctas, min_tiles=min_tiles)
    pieces = schedule.pieces
    alone = np.array_equal(pieces["cta"], np.arange(len(pieces)))
    assert alone == (parts is not None)
    if alone:
        assert np.bincount(pieces["request"], minlength=len(batch)).tolist() == [heads * count for count in parts]
        for request, count in enumerate(parts):
            loads = schedule.loads[pieces["cta"][pieces["request"] == request]]
            assert count == 0 or np.ptp(loads) <= 1
        assert schedule.num_splits == heads * sum(count > 1 for count in parts)


@given(lengths(max_batch=64), shapes(max_heads=4), st.integers(0, 5))
def test_slots_stay_within_the_workspace(batch, shape, spare):
    """The workspace query counts slots from limits alone; no step of those limits uses more."""
    rows = max(len(batch), 1) + spare
    schedule = plan_decode(batch, max_batch=rows, **shape)
    keys = ("num_kv_heads", "q_len", "max_seq_len", "num_ctas", "batch_invariant")
    slots = _core.partial_slots(
        max_batch=rows, window=min(shape["window"] or 0, shape["max_seq_len"]), **{key: shape[key] for key in keys}
    )
    partial = schedule.pieces[~schedule.pieces["whole"]]
    assert partial["slot"].max(initial=-1) < slots
    if not shape["batch_invariant"]:
        assert slots == 2 * shape["num_ctas"]


@pytest.mark.parametrize("q_len", [1, 2, 8])
@pytest.mark.parametrize("window", [1, 448, 449, 505, 506, 511, 512, 513, 960, 1024])
def test_batch_invariant_slots_of_a_window_suffice_and_are_needed(window, q_len):
    """Windows around a whole number of pieces: the query's pieces a request are the most that any length has."""
    rows = plan_decode(range(2500), window=window, q_len=q_len, batch_invariant=True).requests
    assert rows["num_pieces"].max() == _core.partial_slots(1, q_len, window, 1 << 20, 132, True, 1)


@pytest.mark.parametrize("heads", [16, 128])
def test_largest_batch_in_64_bits(heads):
    schedule = plan_decode([1 << 20] * 4096, heads, 1024)
    assert schedule.total_tiles == 4096 * 16384 * heads
    assert check_schedule(schedule.raw, [1 << 20] * 4096, heads, 1024) == []
    assert check_schedule(plan_decode([1 << 20] * 4096, 16, 1).raw, [1 << 20] * 4096, 16, 1) == []


@pytest.mark.parametrize(
    ("case", "ctas", "budget", "used", "cut", "partial"),
    [
        ("64x0.5K", 132, 8, 64, 0, 0),
        ("65x0.5K", 66, 8, 65, 0, 0),
        ("67x0.5K", 66, 15, 63, 28, 56),
        ("64x4K", 132, 32, 128, 64, 128),
        ("32x0.125K+32x4K", 132, 16, 132, 32, 128),
        ("2x32K+30x4K", 132, 25, 132, 32, 132),
        ("1x64K+15x4K", 132, 16, 124, 16, 124),
        ("1x128K+31x4K", 132, 32, 126, 32, 126),
        ("1x4K", 132, 2, 32, 1, 32),
        ("1x32K", 132, 8, 64, 1, 64),
        ("8x8K", 132, 8, 128, 8, 128),
        ("256x1K", 264, 16, 256, 0, 0),
    ],
)
def test_known_schedules(case, ctas, budget, used, cut, partial):
    schedule = plan_decode(parse_lengths(case), 1, ctas)
    have = (schedule.budget, schedule.used_ctas, schedule.num_splits, int((~schedule.pieces["whole"]).sum()))
    assert have == (budget, used, cut, partial)


def test_lengths_outside_are_clamped():
    schedule = plan_decode([-1, -(1 << 40), 1 << 40, 1000], max_seq_len=640)
    assert schedule.requests["seq_len"].tolist() == [0, 0, 640, 640, 0]


def test_static_splits_by_hand():
    fixed = static_split([640, 64], 1, 2, splits=2)  # pieces of 5, 5 and 1 tiles; the second request has one to give
    assert (fixed.loads.tolist(), fixed.makespan, fixed.pieces, fixed.empty_pieces) == ([6, 5], 6, 3, 1)
    sized = static_split([640, 64], 1, 2, piece_tiles=4)  # 4, 4, 2 and 1 tiles in a grid of 2 x 3
    assert (sized.loads.tolist(), sized.makespan, sized.pieces, sized.empty_pieces) == ([6, 5], 6, 4, 2)
    empty = static_split([], 1, 3, splits=4)
    assert (empty.loads.tolist(), empty.makespan, empty.pieces, empty.empty_pieces) == ([0, 0, 0], 0, 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(num_kv_heads=0), dict(num_kv_heads=129), dict(num_ctas=0), dict(num_ctas=1025), dict(q_len=0),
        dict(q_len=9), dict(window=-1), dict(max_seq_len=0), dict(max_seq_len=(1 << 20) + 1), dict(max_batch=1),
        dict(max_batch=4097), dict(min_tiles=0),
    ],
)  # fmt: skip
def test_shapes_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match="plan_host: (batch|" + name + "): expected"):
        plan_decode([64, 64], **wrong)
    with pytest.raises(ValueError, match="splits, piece_tiles: expected one of them positive"):
        static_split([64], splits=1, piece_tiles=1)


def test_more_requests_than_a_map_holds():
    with pytest.raises(ValueError, match=r"max_batch: expected an int in \[1, 4096\], got 4097"):
        plan_decode([1] * 4097)


# ---- Reading a map ----


def test_describe_names_batch_loads_and_pieces():
    text = plan_decode([1000, 0, 5000], 2, 8).describe(limit=2)
    assert "3 requests (1 empty) x 2 KV heads" in text and "190 tiles" in text
    assert "8 of 8 CTAs, budget 27, floor 27" in text and "largest load 27" in text and "lower bound 24" in text
    assert "16 tiles  r0 h0 [0, 16)\n" in text and "... 6 CTAs more" in text
    text = plan_decode([1000, 0, 5000], 2, 5).describe(limit=2)  # a CTA fewer than there may be pairs
    assert "5 of 5 CTAs, budget 38" in text and "r0 h0 [0, 16), r0 h1 [0, 16), r2 h0 [0, 6) -> 1" in text


def test_from_map_refuses_other_bytes():
    raw = plan_decode([1000]).raw
    for wrong in (b"", raw[:-1], raw + b"\0", bytes(len(raw))):
        with pytest.raises(ValueError, match="from_map: raw: expected"):
            DecodeSchedule.from_map(wrong)
