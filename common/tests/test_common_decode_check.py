"""check_schedule finds planted faults: named mutations, any changed byte, and whole maps from a wrong budget."""

import numpy as np
import pytest
from hpc_common.reference.schedule import slow_plan
from hpc_common.schedule import CTA, HEADER, REQUEST, SPLIT, DecodeSchedule, check_schedule, map_bytes, plan_decode
from hpc_common.strategies import lengths, shapes
from hypothesis import assume, given
from hypothesis import strategies as st

CTAS_AT = map_bytes(3, 8) - 8 * 32
MUTATED = dict(batch=[1000, 0, 5000], shape=dict(num_kv_heads=2, num_ctas=8, max_batch=3))


def rows_of(raw: bytearray, name: str):
    """A writable view of the map's rows: header, requests, ctas or splits of the batch in MUTATED."""
    offset, dtype, count = {
        "header": (0, HEADER, 1),
        "requests": (HEADER.itemsize, REQUEST, 4),
        "ctas": (CTAS_AT, CTA, 8),
        "splits": (CTAS_AT + 8 * 16, SPLIT, 8),
    }[name]
    return np.frombuffer(raw, dtype, count, offset)


def add(name, field, row, value):
    def mutate(raw):
        rows_of(raw, name)[field][row] += value

    return pytest.param(mutate, id=f"{name}[{row}].{field}{value:+d}")


def swap_runs(raw):
    ctas = rows_of(raw, "ctas")
    ctas[[2, 3]] = ctas[[3, 2]]


def repeat_run(raw):
    ctas = rows_of(raw, "ctas")
    ctas[3] = ctas[2]


def swap_splits(raw):
    splits = rows_of(raw, "splits")
    splits[[0, 1]] = splits[[1, 0]]


def drop_split(raw):
    splits = rows_of(raw, "splits")
    splits[1:-1] = splits[2:]
    rows_of(raw, "header")["num_splits"] -= 1


def drop_last_run(raw):
    last = int(rows_of(raw, "header")["used_ctas"][0]) - 1
    rows_of(raw, "ctas")[last] = 0
    rows_of(raw, "header")["used_ctas"] -= 1


MUTATIONS = [
    add("ctas", "count", 2, -1),  # a dropped tile
    add("ctas", "count", 7, -1),
    add("ctas", "count", 0, 1),  # a tile run twice
    add("ctas", "tile", 4, 1),
    add("ctas", "kv_head", 1, 1),
    add("ctas", "request", 0, 2),
    add("header", "budget", 0, 1),
    add("header", "floor", 0, 1),
    add("header", "total_tiles", 0, -1),
    add("header", "num_empty", 0, -1),
    add("requests", "num_tiles", 2, -1),
    add("requests", "tile_begin", 2, 1),
    add("requests", "tile_begin", 3, 1),
    add("requests", "first_tile", 0, 1),
    add("requests", "seq_len", 2, 1),
    add("requests", "next", 0, -1),
    add("splits", "first_cta", 0, 1),
    add("splits", "pieces", 1, -1),
    swap_runs,
    repeat_run,
    swap_splits,
    drop_split,
    drop_last_run,
]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_checker_finds_mutations(mutate):
    schedule = plan_decode(MUTATED["batch"], **MUTATED["shape"])
    raw = bytearray(schedule.raw)
    assert check_schedule(raw, MUTATED["batch"], **MUTATED["shape"]) == []
    mutate(raw)
    assert raw != schedule.raw
    assert check_schedule(raw, MUTATED["batch"], **MUTATED["shape"]) != []


@given(lengths(max_batch=12), shapes(max_heads=3, max_ctas=40), st.integers(0, 2), st.data())
def test_checker_finds_any_changed_byte(batch, shape, spare, data):
    rows = max(len(batch), 1) + spare
    raw = bytearray(plan_decode(batch, max_batch=rows, **shape).raw)
    for _ in range(20):
        at, change = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(1, 255))
        raw[at] ^= change
        assert check_schedule(raw, batch, max_batch=rows, **shape) != [], at
        raw[at] ^= change


def written(batch, shape, runs):
    """The right map of a batch, with other runs (and the list of cut pairs that belongs to them)."""
    schedule = plan_decode(batch, **shape)
    raw = bytearray(schedule.raw)
    ctas = np.zeros(schedule.num_ctas, CTA)
    first = schedule.requests["first_tile"]
    for cta, tiles in runs.items():
        request, head, tile = tiles[0]
        ctas[cta] = (request, head, tile - first[request], len(tiles))
    at = map_bytes(schedule.max_batch, 0)
    raw[at : at + ctas.nbytes] = ctas.tobytes()
    header = np.frombuffer(raw, HEADER, 1)
    header["used_ctas"] = len(runs)
    pieces = DecodeSchedule.from_map(raw).pieces
    partial = pieces[~pieces["whole"]]
    pair, at_first, count = np.unique(partial[["request", "kv_head"]], return_index=True, return_counts=True)
    splits = np.zeros((schedule.num_ctas, 4), "<i4")
    for row in range(len(pair)):
        splits[row] = (*pair[row], partial["cta"][at_first[row]], count[row])
    header["num_splits"] = len(pair)
    raw[-splits.nbytes :] = splits.tobytes()
    return raw


@given(batch=lengths(max_batch=20, max_len=2000), shape=shapes(max_heads=3, max_ctas=40, batch_invariant=False))
def test_checker_finds_a_budget_off_by_one(batch, shape):
    """A map that is right in every other way: consistent runs, splits and counts, from a budget one too large."""
    runs, _ = slow_plan(batch, **shape)
    assert check_schedule(written(batch, shape, runs), batch, **shape) == []
    more, _ = slow_plan(batch, **shape, more=1)
    assume(more != runs and max(more, default=0) < shape["num_ctas"])
    assert check_schedule(written(batch, shape, more), batch, **shape) != []
