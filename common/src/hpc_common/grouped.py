"""The routing index and tile task map of a grouped GEMM (mixture of experts): Python face of ``hpc/grouped.hpp``.

An index sorts the (token, slot) pairs of ``topk_ids`` by the expert that this rank owns; a tile map cuts every expert's
rows into tiles. ``build_map`` runs the C++ planner, ``check_map`` checks any map (the planner's or a device's) against
the ids with rules of its own.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from .checks import check_dtype, check_int, check_shape, fail

_WHERE = "hpc_common.grouped"


class TileRule(NamedTuple):
    """How an expert's rows are cut into tiles.

    max_rows: widest tile. granule: widths are multiples of it. even: from two tiles up their number is even, so that
    pairs of tiles share the weights they load.
    """

    max_rows: int = 128
    granule: int = 8
    even: bool = True


DEFAULT_RULE = TileRule()


@dataclass(frozen=True)
class TileMap:
    """An index with its tiles, all int32 on the CPU.

    offsets: [E + 1], first row of each local expert; the last entry is the number of rows.
    row_to_slot: [rows], row -> token * top_k + slot, ascending within an expert.
    slot_to_row: [T, top_k], the inverse; -1 where this rank doesn't own the id.
    tasks: [tiles, 4], (local expert, first row, rows, width); experts ascending, an expert's tiles ascending.
    """

    offsets: torch.Tensor
    row_to_slot: torch.Tensor
    slot_to_row: torch.Tensor
    tasks: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Live (token, slot) pairs."""
        return self.row_to_slot.shape[0]

    @property
    def num_local_experts(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def row_to_token(self) -> torch.Tensor:
        """[rows] int64: the token each row reads."""
        return self.row_to_slot.long() // max(self.slot_to_row.shape[1], 1)


class MapBuffers(NamedTuple):
    """Caller-owned memory for a map, contiguous int32 on the CPU: at least [E + 1], [T * k], [T * k] and [tiles, 4]."""

    offsets: torch.Tensor
    row_to_slot: torch.Tensor
    slot_to_row: torch.Tensor
    tasks: torch.Tensor


def _core() -> ModuleType:
    from . import _core

    return _core


def num_tiles(count: int, rule: TileRule = DEFAULT_RULE, core: ModuleType | None = None) -> int:
    """Tiles of an expert with ``count`` rows: ceil(count / max_rows), made even from two up if the rule says so."""
    return (core or _core()).grouped_num_tiles(count, *rule)


def tile_rows(count: int, rule: TileRule = DEFAULT_RULE, core: ModuleType | None = None) -> int:
    """Width of every tile of an expert with ``count`` rows: the fair share rounded up to the granule; 0 for none."""
    return (core or _core()).grouped_tile_rows(count, *rule)


def tile_span(count: int, tile: int, rule: TileRule = DEFAULT_RULE, core: ModuleType | None = None) -> tuple[int, int]:
    """(first row, rows) of one tile, counted from the expert's first row. ValueError for a tile that is not there."""
    return (core or _core()).grouped_tile_span(count, tile, *rule)


def max_tiles(rows: int, experts: int, rule: TileRule = DEFAULT_RULE, core: ModuleType | None = None) -> int:
    """A bound on the tiles that ``rows`` rows can make whatever their routing: sizes task lists and grids."""
    return (core or _core()).grouped_max_tiles(rows, experts, *rule)


def new_buffers(tokens: int, top_k: int, experts: int, rule: TileRule = DEFAULT_RULE) -> MapBuffers:
    """Uninitialised buffers for a map of ``tokens`` x ``top_k`` ids over ``experts`` local experts."""
    pairs = tokens * top_k
    sizes = ((experts + 1,), (pairs,), (pairs,), (max_tiles(pairs, experts, rule), 4))
    return MapBuffers(*(torch.empty(size, dtype=torch.int32) for size in sizes))


def build_map(
    topk_ids: torch.Tensor,
    num_local_experts: int,
    ep_rank: int = 0,
    rule: TileRule = DEFAULT_RULE,
    buffers: MapBuffers | None = None,
    core: ModuleType | None = None,
) -> TileMap:
    """Index and tiles of the ids that experts [ep_rank * E, (ep_rank + 1) * E) own.

    Args:
        topk_ids: [T, k] int32 or int64 on the CPU, global expert ids, any strides. Ids of other ranks, -1 and ids out
            of any range are skipped. Duplicates in a row get a row each.
        num_local_experts: E, experts on this rank.
        ep_rank: this rank.
        rule: how an expert's rows are cut.
        buffers: memory to write into (what it held is not read); allocated where None.
        core: extension whose planner to run; ``hpc_common._core`` where None.

    Returns a TileMap of views into the buffers. Raises TypeError for other dtypes, ValueError for other shapes, a
    tensor that is not on the CPU, or buffers that are too small.
    """
    check_dtype(_WHERE, "topk_ids", topk_ids, (torch.int32, torch.int64))
    check_shape(_WHERE, "topk_ids", topk_ids, ("T", "k"))
    check_int(_WHERE, "num_local_experts", num_local_experts, 1, 2**20)
    check_int(_WHERE, "ep_rank", ep_rank, 0, 2**31 - 1)
    if topk_ids.device.type != "cpu":
        fail(_WHERE, "topk_ids", "a CPU tensor", f"device {topk_ids.device}")
    tokens, top_k = topk_ids.shape
    if buffers is None:
        buffers = new_buffers(tokens, top_k, num_local_experts, rule)
    need = (num_local_experts + 1, tokens * top_k, tokens * top_k, 0)
    for name, tensor, size in zip(MapBuffers._fields, buffers, need, strict=True):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            fail(_WHERE, name, "contiguous int32 on the CPU", f"{tensor.dtype}, strides {list(tensor.stride())}")
        if tensor.numel() < size:
            fail(_WHERE, name, f"at least {size} elements", tensor.numel())
    rows, tiles = (core or _core()).grouped_build_index(
        topk_ids.data_ptr(), topk_ids.element_size(), tokens, top_k, topk_ids.stride(0), topk_ids.stride(1),
        ep_rank * num_local_experts, num_local_experts, *rule,
        buffers.offsets.data_ptr(), buffers.row_to_slot.data_ptr(), buffers.slot_to_row.data_ptr(),
        buffers.tasks.data_ptr(), buffers.tasks.numel() // 4,
    )  # fmt: skip
    return TileMap(
        buffers.offsets.view(-1)[: num_local_experts + 1],
        buffers.row_to_slot.view(-1)[:rows],
        buffers.slot_to_row.view(-1)[: tokens * top_k].view(tokens, top_k),
        buffers.tasks.view(-1)[: 4 * tiles].view(tiles, 4),
    )


def _assert(condition: object, message: str) -> None:
    if not bool(condition):
        raise AssertionError(f"{_WHERE}: {message}")


def check_map(topk_ids: torch.Tensor, tile_map: TileMap, ep_rank: int = 0, rule: TileRule = DEFAULT_RULE) -> None:
    """AssertionError, saying what is wrong, unless ``tile_map`` is the map of ``topk_ids`` under ``rule``.

    Shares no code with the planner but max_tiles. Checks: offsets monotone and equal to the counts of the ids; every
    live pair in exactly one row, in its expert's range and in token order; the two index arrays inverse to each other;
    the tiles of an expert consecutive, none empty, each row in one; number and width of tiles as the rule says; the
    total within ``max_tiles``. topk_ids may lie on any device; the map's tensors are on the CPU.
    """
    experts = tile_map.num_local_experts
    local = topk_ids.detach().cpu().long().flatten() - ep_rank * experts
    live = (local >= 0) & (local < experts)
    counts = torch.bincount(local[live], minlength=experts)
    offsets = tile_map.offsets.long()
    _assert(offsets[0] == 0, f"offsets start at {int(offsets[0])}")
    _assert((offsets.diff() >= 0).all(), "offsets are not monotone")
    _assert(offsets.diff().equal(counts), "offsets are not the experts' counts")

    rows = tile_map.row_to_slot.long()
    _assert(rows.numel() == int(live.sum()), f"{rows.numel()} rows for {int(live.sum())} live (token, slot) pairs")
    _assert(((rows >= 0) & (rows < local.numel())).all(), "a row names a pair that is not there")
    _assert(rows.unique().numel() == rows.numel(), "a pair has two rows")
    owner = torch.repeat_interleave(torch.arange(experts), counts)
    _assert(local[rows].equal(owner), "a row lies in the range of an expert that is not its own")
    same = owner[1:] == owner[:-1]
    _assert((rows.diff()[same] > 0).all(), "an expert's rows are not in token order")
    inverse = torch.full_like(local, -1)
    inverse[rows] = torch.arange(rows.numel())
    _assert(tile_map.slot_to_row.long().flatten().equal(inverse), "slot_to_row is not the inverse of row_to_slot")

    expert, first, height, width = tile_map.tasks.long().view(-1, 4).unbind(1)
    _assert(((expert >= 0) & (expert < experts)).all(), "a tile of an expert that is not there")
    _assert((expert.diff() >= 0).all(), "tiles are not in the order of experts")
    _assert((height >= 1).all(), "an empty tile")
    ends = first + height
    _assert(int(height.sum()) == rows.numel(), f"tiles hold {int(height.sum())} rows of {rows.numel()}")
    _assert(ends[:-1].equal(first[1:]), "tiles are not consecutive")
    _assert(((first >= offsets[expert]) & (ends <= offsets[expert + 1])).all(), "a tile crosses its expert's range")
    tiles = -(-counts // rule.max_rows)
    tiles = torch.where((tiles > 1) & (tiles % 2 == 1), tiles + 1, tiles) if rule.even else tiles
    _assert(torch.bincount(expert, minlength=experts).equal(tiles), "wrong number of tiles for an expert")
    share = -(-counts // tiles.clamp(min=1))
    _assert(width.equal((-(-share // rule.granule) * rule.granule)[expert]), "wrong tile width")
    _assert((height <= width).all(), "a tile holds more rows than its width")
    bound = max_tiles(local.numel(), experts, rule)
    _assert(tiles.sum() <= bound, f"{int(tiles.sum())} tiles, more than max_tiles says ({bound})")
