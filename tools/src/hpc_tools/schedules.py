"""The decode schedule of a batch beside the two static ones: load per CTA and the figures made from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_common import schedule as decode_schedule

TILE_TOKENS = 64
# The fixed size of the comparison's second static schedule: pieces of 512 tokens.
STATIC_PIECE_TILES = 8


@dataclass(frozen=True)
class Schedule:
    """How one schedule spreads a batch over the CTAs.

    name: for the reader. loads: tiles of 64 tokens that each CTA reads, [num_ctas]. pieces: work items that read
    something; empty: launched ones that read nothing.
    """

    name: str
    loads: tuple[int, ...]
    pieces: int
    empty: int

    @property
    def used(self) -> int:
        """CTAs that read something."""
        return sum(load > 0 for load in self.loads)

    @property
    def largest(self) -> int:
        """The largest load, which decides the kernel's time."""
        return max(self.loads)

    @property
    def mean(self) -> float:
        """The mean load over all CTAs, idle ones included."""
        return sum(self.loads) / len(self.loads)


@dataclass(frozen=True)
class Comparison:
    """The dynamic schedule first, then the static ones, all on as many CTAs.

    total_tiles: of all requests and KV heads. lower_bound: ceil(total_tiles / CTAs), which no schedule beats. floor:
    tiles that the dynamic schedule gives a CTA at least, since combining more pieces would cost more than it saves.
    """

    schedules: tuple[Schedule, ...]
    total_tiles: int
    lower_bound: int
    floor: int

    @property
    def num_ctas(self) -> int:
        return len(self.schedules[0].loads)


def compare(dynamic: decode_schedule.DecodeSchedule, seq_lens: Sequence[int]) -> Comparison:
    """The comparison of a plan's map with static splits of the same batch.

    Fixed count: as many pieces of every (request, KV head) as give each CTA about one. Fixed size: 512 tokens each.
    """
    units = max(1, len(seq_lens) * dynamic.num_kv_heads)
    count = -(-dynamic.num_ctas // units)
    shape = {"num_kv_heads": dynamic.num_kv_heads, "num_ctas": dynamic.num_ctas, "q_len": dynamic.q_len}
    by_count = decode_schedule.static_split(seq_lens, **shape, splits=count)
    by_size = decode_schedule.static_split(seq_lens, **shape, piece_tiles=STATIC_PIECE_TILES)
    named = (
        (f"static, {count} piece{'s' * (count > 1)} a request", by_count),
        (f"static, pieces of {STATIC_PIECE_TILES * TILE_TOKENS} tokens", by_size),
    )
    return Comparison(
        (
            Schedule("dynamic", tuple(dynamic.loads.tolist()), len(dynamic.pieces), 0),
            *(Schedule(name, tuple(s.loads.tolist()), s.pieces, s.empty_pieces) for name, s in named),
        ),
        dynamic.total_tiles,
        dynamic.lower_bound,
        dynamic.floor,
    )
