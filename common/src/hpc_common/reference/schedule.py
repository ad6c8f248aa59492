"""The decode schedule listed tile by tile: an oracle for tests, written apart from ``schedule.hpp`` and slow."""

from collections.abc import Sequence

Tile = tuple[int, int, int]
Piece = tuple[int, int, int, int, int]


def slow_plan(
    batch: Sequence[int],
    num_kv_heads: int,
    num_ctas: int,
    q_len: int,
    window: int | None,
    max_seq_len: int,
    batch_invariant: bool,
    min_tiles: int,
    more: int = 0,
) -> tuple[dict[int, list[Tile]], list[Piece]]:
    """Runs and pieces tile by tile, from the positions that each row sees. ``more``: added to the budget, as a fault.

    Returns ({cta: [(request, head, tile), ...]}, [(cta, request, head, first tile, end tile), ...]), tiles from
    position 0.
    """
    line, piece_starts = [], set()
    for request, length in enumerate(batch):
        length = min(max(length, 0), max_seq_len)
        seen = set()
        for row in range(q_len):
            end = length - q_len + row + 1
            begin = 0 if window is None else max(0, end - window)
            seen |= {position // 64 for position in range(begin, end)}
        tiles = sorted(seen)
        size = 8
        while size * 256 < len(tiles):
            size *= 2
        for head in range(num_kv_heads):
            for number, tile in enumerate(tiles):
                if number % size == 0:
                    piece_starts.add(len(line))
                line.append((request, head, tile))
    floor = min(max(-(-len(line) // 132), min_tiles), 2 * min_tiles)
    share = -(-len(line) // num_ctas)
    step = next(1 << n for n in range(31) if 8 << n >= share)
    rounded = next(tiles for tiles in range(share, 2 * share + 1) if tiles % step == 0)
    if len(line) > 132 * min_tiles and 16 * (rounded - share) <= share:
        floor = max(floor, rounded)
    budget = max(-(-len(line) // num_ctas), floor) + more
    runs, pieces, cta = {}, [], 0
    for index, (request, head, tile) in enumerate(line):
        if not batch_invariant or index in piece_starts:
            cta = index // budget
        last = pieces[-1] if pieces else None
        joins = last and last[:3] == (cta, request, head) and not (batch_invariant and index in piece_starts)
        if joins:
            pieces[-1] = (*last[:4], tile + 1)
        else:
            pieces.append((cta, request, head, tile, tile + 1))
        runs.setdefault(cta, []).append((request, head, tile))
    return runs, pieces
