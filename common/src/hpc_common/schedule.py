"""The decode scheduler's Python face, for tests and the demo; its rules stand in ``include/hpc/schedule.hpp``.

An operator plans with the planner compiled into its own extension; what is here is compiled from the same headers.
"""

from ._decode_check import check_schedule
from ._decode_schedule import (
    CTA,
    HEADER,
    MAX_BATCH,
    MAX_CTAS,
    MAX_SEQ_LEN,
    PIECE,
    REQUEST,
    SPLIT,
    TILE_TOKENS,
    DecodeSchedule,
    StaticSchedule,
    map_bytes,
    plan_decode,
    static_split,
)

__all__ = [
    "CTA",
    "HEADER",
    "MAX_BATCH",
    "MAX_CTAS",
    "MAX_SEQ_LEN",
    "PIECE",
    "REQUEST",
    "SPLIT",
    "TILE_TOKENS",
    "DecodeSchedule",
    "StaticSchedule",
    "check_schedule",
    "map_bytes",
    "plan_decode",
    "static_split",
]
