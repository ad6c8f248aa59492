"""Problem -> Config of the kernels: every problem gets a legal Config, and what must not depend on M doesn't."""

import pytest
from hpc_router_gemm import _C
from hypothesis import given
from hypothesis import strategies as st

SMEM_LIMIT = 227 * 1024

problems = st.fixed_dictionaries(
    {
        "m": st.one_of(st.integers(1, 64), st.integers(1, 300_000)),
        "n": st.one_of(st.integers(1, 1024), st.integers(1, 100_000)),
        "k": st.integers(1, 2_000).map(lambda i: 8 * i),
        "terms": st.integers(1, 3),
        "weight_is_bf16": st.booleans(),
        "presplit": st.booleans(),
    }
)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@given(problems)
def test_config_is_legal_and_covers_the_problem(problem: dict) -> None:
    c = _C.choose_config(**problem)
    assert 1 <= c.split <= 8 or (c.split == 16 and c.kernel == "tile")
    assert 0 < c.smem_bytes <= SMEM_LIMIT
    tiles = (c.rows, c.tokens) if c.kernel == "stream" else (c.rows, c.k_groups, c.tokens)
    wgmma_tiles = _C.PAIRED_TILES if c.paired else _C.TERM_TILES if c.presplit else _C.WGMMA_TILES
    wgmma_tiles = _C.PAIRED_EXPERT_TILES if c.pairs_experts else wgmma_tiles
    assert tiles in (_C.STREAM_TILES if c.kernel == "stream" else wgmma_tiles)
    if c.presplit:  # terms that are in memory, for the tile kernel
        assert problem["presplit"] and problem["terms"] > 1 and not problem["weight_is_bf16"] and c.kernel == "tile"
    assert c.presplit or not c.paired
    assert c.paired or not c.pairs_experts
    pair = 2 if c.paired else 1  # CTAs of two tiles
    assert c.split * pair <= 8 or c.split * pair == 16
    of_tokens, of_experts = (1, pair) if c.pairs_experts else (pair, 1)
    token_tiles = _ceil(problem["m"], c.tokens * of_tokens) * of_tokens
    expert_tiles = _ceil(problem["n"], c.rows * of_experts) * of_experts
    assert c.ctas == token_tiles * expert_tiles * c.split
    assert c.stages >= (1 if c.kernel == "stream" else 2 * c.k_groups)
    # A split rank has work: k in steps of 32 for 8 warps, or in blocks of 128.
    if c.kernel == "tile":
        assert c.split <= _ceil(problem["k"], 128)
    # The same Config by hand is accepted and the same.
    names = ("kernel", "rows", "tokens", "k_groups", "split", "sums_apart", "presplit", "paired", "pairs_experts")
    fields = {name: getattr(c, name) for name in names}
    assert repr(_C.make_config(**{**problem, **fields}, stages=c.stages)) == repr(c)


@given(problems, st.integers(1, 5000))
def test_batch_invariant_order_does_not_depend_on_m(problem: dict, other_m: int) -> None:
    one = _C.choose_config(**problem, batch_invariant=True)
    other = _C.choose_config(**{**problem, "m": other_m}, batch_invariant=True)
    # What decides the order of a score's sum: the kernel, and into how many parts k is cut.
    assert (one.kernel, one.split, one.k_groups) == (other.kernel, other.split, other.k_groups)
    assert not one.presplit and not other.presplit
    if problem["terms"] == 2 and not problem["weight_is_bf16"]:
        assert one.rows * one.tokens <= 512 and other.rows * other.tokens <= 512  # both promote


@given(problems)
def test_two_terms_sum_at_most_256_of_k_unpromoted(problem: dict) -> None:
    problem = {**problem, "terms": 2, "weight_is_bf16": False}
    c = _C.choose_config(**problem)
    if c.kernel == "stream" and c.rows * c.tokens > 512:  # smaller tiles promote at every step
        steps = _ceil(problem["k"], 32)
        assert _ceil(steps, 8 * c.split) * 32 <= 256


@pytest.mark.parametrize(
    "fields",
    [
        {"kernel": "stream", "rows": 64, "tokens": 8},
        {"kernel": "stream", "rows": 16, "tokens": 8, "split": 9},
        {"kernel": "tile", "rows": 64, "tokens": 208, "k_groups": 2},
        {"kernel": "tile", "rows": 128, "tokens": 192, "k_groups": 1, "stages": 16},
        {"kernel": "tile", "rows": 64, "tokens": 104, "k_groups": 2, "stages": 3},
        {"kernel": "tile", "rows": 64, "tokens": 64, "stages": 3},
        {"kernel": "tile", "rows": 64, "tokens": 104, "split": 12},
        {"kernel": "stream", "rows": 16, "tokens": 8, "split": 16},
        {"kernel": "stream", "rows": 16, "tokens": 8, "split": 2, "sums_apart": True},
        {"kernel": "tile", "rows": 64, "tokens": 104, "sums_apart": True},
        {"kernel": "tile", "rows": 64, "tokens": 192, "k_groups": 2, "terms": 3},
        {"kernel": "tile", "rows": 64, "tokens": 192, "k_groups": 2, "presplit": True},
        {"kernel": "tile", "rows": 64, "tokens": 104, "presplit": True, "terms": 1},
        {"kernel": "tile", "rows": 64, "tokens": 104, "presplit": True, "weight_is_bf16": True},
        {"kernel": "stream", "rows": 16, "tokens": 8, "presplit": True},
        {"kernel": "tile", "rows": 64, "tokens": 48, "terms": 2},
        {"kernel": "tile", "rows": 56, "tokens": 64, "presplit": True, "terms": 2},
        {"kernel": "tile", "rows": 56, "tokens": 64, "terms": 3},
        {"kernel": "tile", "rows": 64, "tokens": 64, "paired": True},
        {"kernel": "tile", "rows": 64, "tokens": 176, "presplit": True, "paired": True},
        {"kernel": "tile", "rows": 64, "tokens": 64, "presplit": True, "paired": True, "split": 5},
        {"kernel": "tile", "rows": 64, "tokens": 104, "presplit": True, "pairs_experts": True},
        {"kernel": "tile", "rows": 64, "tokens": 64, "presplit": True, "paired": True, "pairs_experts": True},
        {
            "kernel": "tile",
            "rows": 64,
            "tokens": 104,
            "presplit": True,
            "paired": True,
            "pairs_experts": True,
            "terms": 3,
        },
    ],
)
def test_illegal_configs_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match="config: expected"):
        _C.make_config(m=1000, n=768, k=6144, **fields)


@given(problems)
def test_two_calls_share_an_sm_where_that_is_the_plan(problem: dict) -> None:
    """One-warpgroup tiles take shared memory for two CTAs of an SM unless a measured row gave more stages."""
    problem = {**problem, "terms": 2, "weight_is_bf16": False}
    del problem["presplit"]
    tiles = [(tile, {}) for tile in _C.WGMMA_TILES] + [(tile, {"presplit": True}) for tile in _C.TERM_TILES]
    tiles += [(tile, {"presplit": True, "paired": True}) for tile in _C.PAIRED_TILES]
    for (rows, groups, tokens), weight in tiles:
        # Compiled for those alone.
        of_three = {"terms": 3} if (rows, groups, tokens) in ((64, 1, 48), (56, 1, 64)) else {}
        tile = {"kernel": "tile", "rows": rows, "k_groups": groups, "tokens": tokens, **weight, **of_three}
        c = _C.make_config(**{**problem, **tile})
        light = rows == 64 and groups == 1 and tokens <= 128
        assert c.smem_bytes <= (113 * 1024 if light else SMEM_LIMIT)


@pytest.mark.parametrize("sizes", [{"m": 0, "n": 8, "k": 8}, {"m": 1, "n": 0, "k": 8}, {"m": 1, "n": 8, "k": 12}])
def test_sizes_out_of_range(sizes: dict) -> None:
    with pytest.raises(ValueError, match="hpc_router_gemm.config"):
        _C.choose_config(**sizes)


@given(problems, st.sampled_from((1, 2, 4)))
def test_sums_apart_have_memory_beside_a_block_of_k(problem: dict, split: int) -> None:
    tile = {"kernel": "tile", "rows": 64, "k_groups": 1, "tokens": 104, "split": split, "sums_apart": True}
    problem = {**problem, "terms": 2, "weight_is_bf16": False}
    if split == 1 or _ceil(problem["k"], 128) < split:
        with pytest.raises(ValueError, match="hpc_router_gemm.make_config"):
            _C.make_config(**problem, **tile)
    else:
        assert _C.make_config(**problem, **tile).smem_bytes >= 2 * 64 * (256 + 208) + 64 * 104 * 4


def test_of_two_token_groups_the_first_has_its_sums_apart() -> None:
    """64 x 176: a warpgroup has 11 blocks of 64 x 8, of which a rank of three owns 4 at most."""
    c = _C.choose_config(m=528, n=768, k=6144, presplit=True)
    assert (c.tokens, c.split, c.stages, c.sums_apart) == (176, 3, 5, True)
    fields = {"kernel": "tile", "rows": 64, "tokens": 176, "split": 3, "stages": 5, "presplit": True}
    over_stages = _C.make_config(m=528, n=768, k=6144, **fields)
    assert c.smem_bytes == over_stages.smem_bytes + 3 * 4 * 64 * 8 * 4


@given(problems, st.sampled_from((1, 2, 4, 8)))
def test_pairs_are_of_two_token_tiles(problem: dict, split: int) -> None:
    """Their CTAs are in one cluster, and a last token tile that is alone has a partner with nothing to store."""
    problem = {**problem, "k": 6144, "terms": 2, "weight_is_bf16": False, "presplit": True}
    c = _C.make_config(**problem, kernel="tile", rows=64, tokens=64, split=split, paired=True)
    assert c.ctas == _ceil(problem["m"], 128) * 2 * _ceil(problem["n"], 64) * split


@given(problems, st.sampled_from((1, 2, 4, 8)))
def test_pairs_of_two_expert_tiles(problem: dict, split: int) -> None:
    problem = {**problem, "k": 6144, "terms": 2, "weight_is_bf16": False, "presplit": True}
    pairs = {"paired": True, "pairs_experts": True}
    c = _C.make_config(**problem, kernel="tile", rows=64, tokens=104, split=split, **pairs)
    assert c.ctas == _ceil(problem["m"], 104) * _ceil(problem["n"], 128) * 2 * split


def test_measured_rows_for_pairs() -> None:
    of_tokens = ((256, 384, 3072, 64, 4), (1024, 192, 4096, 104, 4), (256, 768, 6144, 128, 4))
    of_experts = ((512, 384, 3072, 104, 4), (1024, 384, 3072, 104, 2), (512, 768, 6144, 104, 2))
    for m, n, k, tokens, split in of_tokens + of_experts:
        c = _C.choose_config(m=m, n=n, k=k, presplit=True)
        assert (c.paired, c.tokens, c.split) == (True, tokens, split) and c.ctas <= 120  # resident in clusters of 4, 8
        assert c.pairs_experts == ((m, n, k, tokens, split) in of_experts)
        assert not _C.choose_config(m=m, n=n, k=k).paired


@given(problems, st.sampled_from((1, 2, 3, 4, 8)), st.booleans(), st.booleans())
def test_tiles_whose_tokens_are_the_rows_of_wgmma(problem: dict, split: int, apart: bool, paired: bool) -> None:
    """56 experts x 64 tokens: 7 blocks of sums. Chosen for nothing but what was measured."""
    problem = {**problem, "k": 6144, "terms": 3, "weight_is_bf16": False, "presplit": True}
    tile = {"kernel": "tile", "rows": 56, "tokens": 64, "presplit": True, "paired": paired}
    c = _C.make_config(**{**problem, **tile}, split=split, sums_apart=apart and split > 1)
    pair = 2 if paired else 1
    assert c.ctas == _ceil(problem["m"], 64 * pair) * pair * _ceil(problem["n"], 56) * split
    sums = split * _ceil(7, split) * 64 * 8 * 4 if c.sums_apart else 0
    assert c.smem_bytes >= c.stages * 64 * 2 * (3 * 56 + 64) + sums
    assert _C.choose_config(**{**problem, "n": problem["n"] + 1000}).rows != 56


def test_measured_rows_of_three_terms() -> None:
    """Three terms have Configs of their own where those of two would take too long, with the terms in memory or not."""
    for m, n, k, tile, split in (
        (1, 896, 7168, (32, 1, 8), 6),
        (48, 256, 7168, (64, 2, 48), 16),
        (96, 256, 7168, (64, 2, 32), 8),
        (96, 192, 4096, (64, 1, 48), 16),
        (96, 384, 3072, (64, 1, 48), 8),
        (128, 256, 7168, (64, 2, 48), 8),
        (96, 768, 6144, (64, 1, 96), 8),
        (128, 896, 7168, (64, 2, 128), 8),
    ):
        for presplit in (False, True):
            c = _C.choose_config(m=m, n=n, k=k, terms=3, presplit=presplit)
            assert (c.rows, c.k_groups, c.tokens) == tile and c.split == split and not c.presplit
            assert c.ctas <= 132 or c.kernel == "stream"  # one wave of an H200
