"""The decode schedule listed tile by tile: an oracle for tests, written apart from ``schedule.hpp`` and slow."""

import math
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
    line, piece_starts, pairs = [], set(), []
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
            pairs.append(len(tiles))
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
    owner: list[int] = []
    if not batch_invariant and len(pairs) <= num_ctas < 512 and line:  # CTAs of its own for every (request, head)?
        half = next((tiles for tiles in range(min_tiles, 4 * min_tiles + 1) if 66 * tiles >= len(line)), 2 * min_tiles)
        base = max(share, half)
        for extra in range(6):
            budget = base + math.ceil(extra * max(base, 16 * min_tiles) / 32)
            parts = sum(math.ceil(tiles / budget) for tiles in pairs)
            if parts <= num_ctas:
                if max(pairs) <= budget + parts * min_tiles / 36:
                    budget = max(pairs)
                for tiles in pairs:
                    first, count = owner[-1] + 1 if owner else 0, math.ceil(tiles / (budget + more))
                    owner += sorted(first + tile % count for tile in range(tiles))
                break
    other = budget if owner else max(share, floor)
    if not batch_invariant and num_kv_heads == 1 and num_ctas == 132 and 57 <= len(pairs) <= 66:  # two CTAs each?
        if other < max(pairs) and math.ceil(max(pairs) / 2) <= other + min_tiles:
            owner = []
            for pair, tiles in enumerate(pairs):
                owner += sorted(2 * pair + tile % 2 for tile in range(tiles))
    budget = max(share, floor) + more
    weights = [tiles + 3 * min_tiles if tiles > 2 else tiles for tiles in pairs]
    if not batch_invariant and len(pairs) > num_ctas and 3 * min_tiles < share <= 1 << 24:
        if min_tiles < floor <= 2 * min_tiles or (
            floor > min_tiles and any(tiles % step for tiles in pairs)
        ):  # what a pair costs beside its tiles counts
            budget, begin = math.ceil(sum(weights) / num_ctas) + more, 0
            for tiles, weight in zip(pairs, weights, strict=True):
                begin += weight
                owner += [tile // budget for tile in range(begin - tiles, begin)]
    runs, pieces, cta = {}, [], 0
    for index, (request, head, tile) in enumerate(line):
        if owner:
            cta = owner[index]
        elif not batch_invariant or index in piece_starts:
            cta = index // budget
        last = pieces[-1] if pieces else None
        joins = last and last[:3] == (cta, request, head) and not (batch_invariant and index in piece_starts)
        if joins:
            pieces[-1] = (*last[:4], tile + 1)
        else:
            pieces.append((cta, request, head, tile, tile + 1))
        runs.setdefault(cta, []).append((request, head, tile))
    return runs, pieces
