"""The grouped-GEMM tile map: properties over random routings, edges of the tile rule, and planted faults."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hpc_common import grouped
from hpc_common.grouped import TileMap, TileRule, build_map, check_map
from hypothesis import example, given, settings
from hypothesis import strategies as st

RULES = st.sampled_from([TileRule(), TileRule(8, 8, False), TileRule(64, 8, True), TileRule(256, 16, True)])


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """(topk_ids, experts on a rank, rank): uniform, skewed, one-expert and empty, with -1, wild and duplicate ids."""
    experts = draw(st.sampled_from([1, 2, 3, 7, 24, 128, 512]))
    ranks = draw(st.sampled_from([1, 2, 8]))
    rank = draw(st.integers(0, ranks - 1))
    tokens = draw(st.sampled_from([0, 1, 2, 5, 33, 129, 1000, 4096]))
    top_k = draw(st.sampled_from([1, 2, 8, 32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    total, shape = experts * ranks, (tokens, top_k)
    kind = draw(st.sampled_from(["uniform", "zipf", "one", "few"]))
    if kind == "uniform":
        ids = torch.randint(0, total, shape, generator=generator)
    elif kind == "one":
        ids = torch.full(shape, draw(st.integers(0, total - 1)))
    elif kind == "few":
        ids = torch.randint(0, total, (3,), generator=generator)[torch.randint(0, 3, shape, generator=generator)]
    else:
        weights = 1.0 / torch.arange(1, total + 1)
        picked = torch.multinomial(weights, max(tokens * top_k, 1), True, generator=generator)
        ids = picked[: tokens * top_k].view(shape)
    dead = draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    wild = torch.tensor([-1, total, -(2**31), 2**31 - 1])[torch.randint(0, 4, shape, generator=generator)]
    ids = torch.where(torch.rand(shape, generator=generator) < dead, wild, ids)
    return ids.to(draw(st.sampled_from([torch.int32, torch.int64]))), experts, rank


@given(routings(), RULES)
def test_map_holds_every_invariant(routing: tuple[torch.Tensor, int, int], rule: TileRule) -> None:
    ids, experts, rank = routing
    check_map(ids, build_map(ids, experts, rank, rule), rank, rule)


@given(routings())
def test_ranks_split_what_one_rank_holds(routing: tuple[torch.Tensor, int, int]) -> None:
    ids, experts, _ = routing
    ranks = 4
    whole = build_map(ids, experts * ranks, 0)
    parts = [build_map(ids, experts, rank) for rank in range(ranks)]
    assert torch.cat([part.row_to_slot for part in parts]).equal(whole.row_to_slot)
    assert sum(part.tasks.shape[0] for part in parts) == whole.tasks.shape[0]


@given(routings())
def test_permuting_tokens_permutes_rows_only(routing: tuple[torch.Tensor, int, int]) -> None:
    ids, experts, rank = routing
    order = torch.randperm(ids.shape[0], generator=torch.Generator().manual_seed(0))
    first, second = build_map(ids, experts, rank), build_map(ids[order], experts, rank)
    assert first.offsets.equal(second.offsets)
    assert first.tasks.equal(second.tasks)
    pairs = torch.arange(ids.numel()).view(ids.shape)[order].flatten()
    for begin, end in zip(first.offsets[:-1].tolist(), first.offsets[1:].tolist(), strict=True):
        assert pairs[second.row_to_slot[begin:end].long()].sort().values.equal(first.row_to_slot[begin:end].long())


def test_buffers_need_not_be_clean_and_nothing_is_written_behind_the_map() -> None:
    ids = torch.tensor([[0, 3], [-1, 3], [9, 1]])
    clean = build_map(ids, 4)
    buffers = grouped.MapBuffers(*(torch.full_like(each, -77) for each in grouped.new_buffers(3, 2, 4)))
    dirty = build_map(ids, 4, buffers=buffers)
    for have, want in zip(vars(dirty).values(), vars(clean).values(), strict=True):
        assert have.equal(want)
    assert (buffers.row_to_slot[clean.num_rows :] == -77).all()
    assert (buffers.tasks[clean.tasks.shape[0] :] == -77).all()


def test_strided_ids_and_both_widths_give_one_map() -> None:
    wide = torch.randint(-1, 40, (50, 12), generator=torch.Generator().manual_seed(1))
    ids = wide[:, 2:6]
    want = build_map(ids.contiguous(), 16, 1)
    for view in (ids, ids.int(), ids.t().contiguous().t(), wide.int()[:, 2:6]):
        assert build_map(view, 16, 1).row_to_slot.equal(want.row_to_slot)


def test_ids_near_the_ends_of_int64_are_skipped() -> None:
    ids = torch.tensor([[-(2**63), 2**63 - 1, -1, 5]])
    assert build_map(ids, 4, 1).row_to_slot.tolist() == [3]


EDGES = sorted(
    {edge + step for edge in (0, 1, 8, 64, 120, 128, 256, 384, 512, 1024, 32640, 32768) for step in (-1, 0, 1)}
)


@pytest.mark.parametrize("count", [edge for edge in EDGES if edge >= 0])
@pytest.mark.parametrize("rule", [TileRule(), TileRule(8, 8, False)])
def test_tile_rule_at_its_edges(count: int, rule: TileRule) -> None:
    tiles, width = grouped.num_tiles(count, rule), grouped.tile_rows(count, rule)
    spans = [grouped.tile_span(count, tile, rule) for tile in range(tiles)]
    assert width <= rule.max_rows and width % rule.granule == 0
    assert not rule.even or tiles < 2 or tiles % 2 == 0
    assert all(1 <= rows <= width for _, rows in spans)
    starts = [0, *(first + rows for first, rows in spans)]
    assert starts[:-1] == [first for first, _ in spans] and starts[-1] == count
    if count:  # padding is less than a granule a tile
        assert width * tiles < count + rule.granule * tiles


def test_tile_widths_are_the_stated_ones() -> None:
    widths = {1: 8, 8: 8, 9: 16, 127: 128, 128: 128, 129: 72, 171: 88, 256: 128, 257: 72, 341: 88, 512: 128, 513: 88}
    assert {count: grouped.tile_rows(count) for count in widths} == widths


@given(st.lists(st.integers(0, 700), min_size=1, max_size=12), RULES)
@example([17, 0], TileRule(8, 8, True))
@example([257] * 8, TileRule())
def test_max_tiles_bounds_every_routing(counts: list[int], rule: TileRule) -> None:
    tiles = sum(grouped.num_tiles(count, rule) for count in counts)
    assert tiles <= grouped.max_tiles(sum(counts), len(counts), rule)


def test_max_tiles_is_nearly_tight() -> None:
    rule = TileRule(8, 8, True)
    rows, experts = 120, 3
    best = [[0] + [-rows] * rows]
    for _ in range(experts):  # best[e][r]: most tiles of r rows over e experts, by trying every share
        best.append([max(best[-1][r - c] + grouped.num_tiles(c, rule) for c in range(r + 1)) for r in range(rows + 1)])
    gaps = [grouped.max_tiles(r, experts, rule) - best[-1][r] for r in range(rows + 1)]
    assert min(gaps) >= 0 and max(gaps) <= 2


def _edit(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    copy = tensor.clone()
    change(copy)
    return copy


def _swap(tensor: torch.Tensor, a: int, b: int) -> None:
    tensor[[a, b]] = tensor[[b, a]]


def _swap_rows(good: TileMap, a: int, b: int) -> TileMap:
    """Two rows exchanged in both arrays, so that they stay inverse to each other."""
    rows = _edit(good.row_to_slot, lambda t: _swap(t, a, b))
    inverse = _edit(good.slot_to_row.view(-1), lambda t: _swap(t, int(rows[a]), int(rows[b])))
    return replace(good, row_to_slot=rows, slot_to_row=inverse.view(good.slot_to_row.shape))


# Each takes a good map of 3 experts with 300, 5 and 200 rows, and plants one fault.
FAULTS: dict[str, Callable[[TileMap], TileMap]] = {
    "offset one too far": lambda m: replace(m, offsets=_edit(m.offsets, lambda t: t[1].add_(1))),
    "offset of the last expert": lambda m: replace(m, offsets=_edit(m.offsets, lambda t: t[2].sub_(1))),
    "offsets not monotone": lambda m: replace(m, offsets=_edit(m.offsets, lambda t: t[1].fill_(400))),
    "dropped row": lambda m: replace(m, row_to_slot=m.row_to_slot[:-1]),
    "row twice": lambda m: replace(m, row_to_slot=_edit(m.row_to_slot, lambda t: t[7].copy_(t[6]))),
    "rows swapped within an expert": lambda m: _swap_rows(m, 3, 4),
    "rows swapped between experts": lambda m: _swap_rows(m, 299, 300),
    "inverse swapped": lambda m: replace(m, slot_to_row=_edit(m.slot_to_row, lambda t: _swap(t, 0, 1))),
    "dead slot given a row": lambda m: replace(m, slot_to_row=_edit(m.slot_to_row, lambda t: t[-1, -1].fill_(0))),
    "dropped tile": lambda m: replace(m, tasks=torch.cat([m.tasks[:2], m.tasks[3:]])),
    "dropped last tile": lambda m: replace(m, tasks=m.tasks[:-1]),
    "tile twice": lambda m: replace(m, tasks=torch.cat([m.tasks, m.tasks[-1:]])),
    "tiles swapped": lambda m: replace(m, tasks=_edit(m.tasks, lambda t: _swap(t, 0, 1))),
    "tile of the wrong expert": lambda m: replace(m, tasks=_edit(m.tasks, lambda t: t[-1, 0].sub_(1))),
    "tile one row short": lambda m: replace(m, tasks=_edit(m.tasks, lambda t: t[-1, 2].sub_(1))),
    "tile one row late": lambda m: replace(m, tasks=_edit(m.tasks, lambda t: t[1, 1].add_(1))),
    "width of another count": lambda m: replace(m, tasks=_edit(m.tasks, lambda t: t[0, 3].add_(8))),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(5))
def test_check_map_rejects(fault: str, seed: int) -> None:
    flat = torch.cat([torch.zeros(300), torch.full((5,), 1), torch.full((200,), 2), torch.full((15,), -1)]).int()
    flat[:-1] = flat[:-1][torch.randperm(519, generator=torch.Generator().manual_seed(seed))]
    ids = flat.view(65, 8)
    good = build_map(ids, 3)
    check_map(ids, good)
    with pytest.raises(AssertionError, match="hpc_common.grouped"):
        check_map(ids, FAULTS[fault](good))


@given(routings(), st.integers(0, 10**6))
@settings(max_examples=max(settings.default.max_examples // 2, 1))
def test_check_map_rejects_any_lost_row_or_tile(routing: tuple[torch.Tensor, int, int], pick: int) -> None:
    ids, experts, rank = routing
    good = build_map(ids, experts, rank)
    if not good.num_rows:
        return
    row, tile = pick % good.num_rows, pick % good.tasks.shape[0]
    for bad in (
        replace(good, row_to_slot=torch.cat([good.row_to_slot[:row], good.row_to_slot[row + 1 :]])),
        replace(good, tasks=torch.cat([good.tasks[:tile], good.tasks[tile + 1 :]])),
        replace(good, offsets=_edit(good.offsets, lambda t: t[1 + pick % experts].add_(1))),
    ):
        with pytest.raises(AssertionError, match="hpc_common.grouped"):
            check_map(ids, bad, rank)


def test_bad_input() -> None:
    ids = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match="topk_ids: expected dtype"):
        build_map(ids.float(), 4)
    with pytest.raises(ValueError, match="topk_ids: expected shape"):
        build_map(ids[0], 4)
    with pytest.raises(ValueError, match="num_local_experts"):
        build_map(ids, 0)
    with pytest.raises(ValueError, match="max_rows"):
        build_map(ids, 4, rule=TileRule(12, 8))
    with pytest.raises(ValueError, match="tile: expected an int in"):
        grouped.tile_span(128, 1)
    small = grouped.new_buffers(3, 2, 4)
    with pytest.raises(ValueError, match="row_to_slot: expected at least 8 elements"):
        build_map(ids, 4, buffers=small)
    with pytest.raises(ValueError, match="tasks: expected room for every tile"):
        build_map(ids, 4, buffers=grouped.new_buffers(4, 2, 4)._replace(tasks=torch.empty(0, 4, dtype=torch.int32)))
    check_map(ids, build_map(ids, 4))  # the next valid call works
