"""hypothesis strategies for decode batches, shared by the tests of the host planner and of the device's."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

KINDS = ("equal", "uniform", "log", "edges", "one long", "mostly empty")


@st.composite
def lengths(draw: Any, max_batch: int = 4096, max_len: int = 1 << 20) -> list[int]:
    """Lengths of a batch of 0 to ``max_batch`` requests, each 0 to ``max_len`` tokens.

    Half of the batches are short lists, drawn number by number so that they shrink; the others come from a seed, for
    hypothesis draws thousands of numbers too slowly, in the shapes that serving has: equal, uniform, spread over orders
    of magnitude, around multiples of the tile, one long among short ones, mostly empty.
    """
    if draw(st.booleans()):
        length = st.one_of(st.integers(0, max_len), st.integers(0, min(300, max_len)), st.sampled_from([0, 1, max_len]))
        return draw(st.lists(length, max_size=min(max_batch, 40)))
    batch = draw(st.one_of(st.integers(0, max_batch), st.sampled_from([1, max_batch])))
    kind = draw(st.sampled_from(KINDS))
    longest = draw(st.one_of(st.integers(1, max_len), st.sampled_from([min(4096, max_len), max_len])))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    if kind == "equal":
        values = np.full(batch, longest)
    elif kind == "uniform":
        values = rng.integers(0, longest + 1, batch)
    elif kind == "log":
        values = np.exp(rng.uniform(0, np.log(longest), batch)).astype(np.int64)
    elif kind == "edges":
        values = rng.integers(0, longest // 64 + 1, batch) * 64 + rng.integers(-1, 2, batch)
    elif kind == "one long":
        values = rng.integers(0, min(longest, 512) + 1, batch)
        values[rng.integers(0, batch, min(batch, 1))] = longest
    else:
        values = np.where(rng.random(batch) < 0.95, 0, rng.integers(0, longest + 1, batch))
    return np.clip(values, 0, max_len).tolist()


@st.composite
def shapes(draw: Any, max_heads: int = 16, max_ctas: int = 1024, batch_invariant: bool | None = None) -> dict[str, Any]:
    """The other arguments of ``plan_decode`` (without max_batch), as keywords."""
    window = st.one_of(st.none(), st.integers(1, 1 << 20), st.sampled_from([1, 63, 64, 65, 128, 4096]))
    limit = st.one_of(st.just(1 << 20), st.integers(1, 1 << 20))
    return dict(
        num_kv_heads=draw(st.integers(1, max_heads)),
        num_ctas=draw(st.one_of(st.integers(1, max_ctas), st.sampled_from([132, 264]).filter(lambda n: n <= max_ctas))),
        q_len=draw(st.integers(1, 8)),
        window=draw(window),
        max_seq_len=draw(limit),
        batch_invariant=draw(st.booleans()) if batch_invariant is None else batch_invariant,
        min_tiles=draw(st.sampled_from([1, 2, 4])),
    )
