"""DecodePlan on a CPU: its map against the checker, its sizes against what runs, its refusals."""

import pytest
import torch
from hpc_attention import DecodePlan, decode
from hpc_common.poison import Canary, dirty_, paged_cache
from hpc_common.schedule import check_schedule, map_bytes, plan_decode
from hpc_common.strategies import lengths, shapes
from hypothesis import given
from hypothesis import strategies as st

SIZES = dict(max_batch=8, num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16, device="cpu")
FP8 = torch.float8_e4m3fn


def plan_of(**changes):
    return DecodePlan(**{**SIZES, **changes})


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def faults(plan, batch):
    """What check_schedule says of the plan's map for a batch."""
    window = min(plan.window, plan.max_seq_len) if plan.window else None
    return check_schedule(
        plan.map.numpy(), batch, plan.num_kv_heads, plan.num_ctas, plan.q_len, window, plan.max_seq_len,
        plan.batch_invariant, plan.max_batch, plan.min_tiles,
    )  # fmt: skip


# ---- The map ----


@given(lengths(max_batch=200), shapes(max_heads=4), st.integers(0, 1 << 16), st.sampled_from([64, 128, 256]))
def test_update_writes_the_right_map_over_any_contents(batch, shape, seed, head_dim):
    batch = [min(length, shape["max_seq_len"]) for length in batch[: 20 if shape["batch_invariant"] else None]]
    heads, _ = shape.pop("num_kv_heads"), shape.pop("min_tiles")  # the plan decides on min_tiles itself
    plan = DecodePlan(
        max(len(batch), 1) + seed % 3, heads, heads, head_dim, page_size=64, kv_dtype=FP8, device="cpu", **shape
    )
    dirty_(plan.map, seed)
    plan.update(int32(batch))
    assert faults(plan, batch) == []
    assert plan.batch == len(batch)


def test_a_new_plan_holds_an_empty_batch():
    plan = plan_of()
    assert faults(plan, []) == [] and plan.batch == 0
    assert "0 requests" in plan.describe()


def test_updates_follow_each_other():
    """A smaller batch after a larger one, lengths changed in place, an aborted update: each map as from a new plan."""
    plan, seq_lens = plan_of(), int32([4096, 1, 1, 1, 777, 0, 3, 9])
    plan.update(seq_lens)
    for batch in ([1, 1, 1, 8192], [5], [], [100] * 8):
        seq_lens[: len(batch)] = int32(batch)
        plan.update(seq_lens[: len(batch)])
        fresh = plan_of()
        fresh.update(int32(batch))
        assert torch.equal(plan.map, fresh.map) and faults(plan, batch) == []
        with pytest.raises(ValueError):
            plan.update(int32([-1]))
        assert torch.equal(plan.map, fresh.map) and plan.batch == len(batch)


@pytest.mark.parametrize("q_len", range(1, 9))
def test_every_q_len_is_planned(q_len):
    plan = plan_of(q_len=q_len, window=1)
    plan.update(int32([70, q_len, 1, 128]))
    assert faults(plan, [70, q_len, 1, 128]) == [] and plan.rows == 4 * q_len
    # 65 + q_len - 1 tokens whose rows see one key each: row 0 sees position 64 alone.
    plan.update(int32([64 + q_len]))
    assert plan.host_map().requests["first_tile"][0] == 1


def test_a_window_as_long_as_the_requests_is_none():
    batch, maps = int32([1000, 5000]), []
    for window in (None, 5000, 1 << 40):
        plan = plan_of(window=window, max_seq_len=5000)
        plan.update(batch)
        assert faults(plan, batch.tolist()) == []
        maps.append(plan.map[64:])  # all but the header, which names the window
    assert torch.equal(maps[0], maps[1]) and torch.equal(maps[0], maps[2])


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "want"),
    [(64, FP8, 4), (128, FP8, 2), (256, FP8, 1), (128, torch.bfloat16, 1), (64, torch.float16, 2)],
)
def test_the_floor_follows_the_bytes_of_a_tile(head_dim, kv_dtype, want):
    plan = plan_of(head_dim=head_dim, kv_dtype=kv_dtype)
    plan.update(int32([2048]))
    schedule = plan.host_map()
    assert plan.min_tiles == schedule.min_tiles == schedule.floor == want


def test_host_map_and_describe():
    plan = plan_of(window=100)
    plan.update(int32([1000, 0, 50]))
    schedule = plan.host_map()
    assert schedule.raw == plan_decode([1000, 0, 50], 2, window=100, max_batch=8, min_tiles=2).raw
    assert schedule.requests["first_tile"].tolist() == [14, 0, 0, 0]
    text = plan.describe()
    assert "window=100" in text and "3 requests (1 empty) x 2 KV heads" in text and "r0 h1 [14, 16)" in text


# ---- Sizes ----


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("resident", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_workspace_query_is_what_decode_writes(one_thread, batch_invariant, resident, batch):
    """Partial results stay inside a workspace of the queried size, between canaries; a byte less is refused."""
    heads, dim, page_size, longest = 2, 64, 64, 2048
    sizes = dict(
        max_batch=64, num_q_heads=4, num_kv_heads=heads, head_dim=dim, page_size=page_size, device="cpu",
        batch_invariant=batch_invariant, max_seq_len=longest, num_ctas=8 * resident,
    )  # fmt: skip
    needed = DecodePlan.sizes(**sizes).workspace_bytes
    for length in (1, 64, 65, longest // (4 if batch == 64 else 1)):
        kv = [torch.randn(length, heads, dim).bfloat16()] * batch
        cache = paged_cache(kv, kv, page_size)
        with Canary([needed]) as workspace:
            plan = DecodePlan(**sizes, workspace=workspace)
            plan.update(cache.seq_lens)
            q = torch.randn(batch, 4, dim).bfloat16()
            out = decode(q, cache.k_cache, cache.v_cache, cache.page_table, plan)
            assert out.isfinite().all()
    with pytest.raises(ValueError, match=rf"workspace: expected at least {needed} bytes, got {needed - 1} bytes"):
        DecodePlan(**sizes, workspace=torch.empty(needed - 1, dtype=torch.uint8))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_sizes_are_what_a_plan_allocates(batch_invariant):
    arguments = {**SIZES, "batch_invariant": batch_invariant, "max_seq_len": 10_000, "q_len": 3}
    sizes, plan = DecodePlan.sizes(**arguments), DecodePlan(**arguments)
    assert sizes.map_bytes == plan.map.numel() == map_bytes(8, 132)
    assert sizes.workspace_bytes == plan.workspace_bytes == plan.workspace.numel() * plan.workspace.element_size()
    # 157 tiles in pieces of 8, for every request and head; otherwise two a CTA.
    assert sizes.partial_slots == (8 * 2 * 20 if batch_invariant else 2 * 132)
    assert sizes.workspace_bytes >= sizes.partial_slots * sizes.rows * (64 + 1) * 4


# ---- Refusals ----


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(q_len=0), ValueError, "q_len: expected 1 to 8, got 0"),
        (dict(q_len=9), ValueError, "q_len: expected 1 to 8, got 9"),
        (dict(q_len=True), TypeError, "q_len: expected an int, got bool True"),
        (dict(head_dim=72), ValueError, r"head_dim: expected one of \(64, 128, 256\), got 72"),
        (dict(page_size=48), ValueError, r"page_size: expected one of \(1, 16, 32, 64, 128, 256\), got 48"),
        (dict(num_q_heads=7), ValueError, "num_q_heads: expected 1 to 16 times num_kv_heads .* got 7"),
        (dict(num_q_heads=34), ValueError, "num_q_heads: expected 1 to 16 times num_kv_heads .* got 34"),
        (dict(num_kv_heads=0), ValueError, "num_kv_heads: expected 1 to 128, got 0"),
        (dict(max_batch=0), ValueError, r"max_batch: expected an int in \[1, 4096\], got 0"),
        (dict(max_batch=4097), ValueError, r"max_batch: expected an int in \[1, 4096\], got 4097"),
        (dict(max_batch=2.0), TypeError, "max_batch: expected an int, got float 2.0"),
        (dict(window=0), ValueError, "window: expected None or at least 1 .* got 0"),
        (dict(kv_dtype=torch.float32), ValueError, "kv_dtype: expected torch.bfloat16 or .* got torch.float32"),
        (dict(kv_dtype="fp8"), TypeError, "kv_dtype: expected torch.bfloat16 or .* got fp8"),
        (dict(batch_invariant=True), ValueError, "max_seq_len: expected an int with batch_invariant=True"),
        (dict(batch_invariant=1), TypeError, "batch_invariant: expected a bool, got 1"),
        (dict(max_seq_len=0), ValueError, r"max_seq_len: expected an int in \[1, 1048576\], got 0"),
        (dict(max_seq_len=1048577), ValueError, r"max_seq_len: expected an int in \[1, 1048576\], got 1048577"),
        (dict(num_ctas=1025), ValueError, r"num_ctas: expected an int in \[1, 1024\], got 1025"),
        (dict(device="meta"), ValueError, "device: expected cpu or cuda, got meta"),
        (dict(workspace=[1.0]), TypeError, "workspace: expected a torch.Tensor, got list"),
    ],
)
def test_plans_that_cannot_be(changes, error, message):
    with pytest.raises(error, match=message):
        plan_of(**changes)


@pytest.mark.parametrize(
    ("seq_lens", "error", "message"),
    [
        ([1, 2], TypeError, "seq_lens: expected a torch.Tensor, got list"),
        (torch.ones(3), TypeError, "seq_lens: expected dtype torch.int32, got torch.float32"),
        (torch.ones(3, dtype=torch.int64), TypeError, "seq_lens: expected dtype torch.int32, got torch.int64"),
        (int32([[1]]), ValueError, r"seq_lens: expected shape \[B\] .* got shape \[1, 1\]"),
        (int32([1] * 9), ValueError, r"seq_lens: expected shape \[B\] with B at most max_batch 8, got shape \[9\]"),
        (int32([1] * 6)[::2], ValueError, r"seq_lens: expected a contiguous tensor, got strides \[2\]"),
        (int32([5, -3]), ValueError, r"seq_lens: expected lengths in \[0, 1048576\], got -3 \(request 1\)"),
        (int32([5, 1048577]), ValueError, r"seq_lens: expected lengths in \[0, 1048576\], got 1048577 \(request 1\)"),
    ],
)
def test_updates_that_cannot_be(seq_lens, error, message):
    plan = plan_of()
    with pytest.raises(error, match="hpc_attention.DecodePlan.update: " + message):
        plan.update(seq_lens)
    plan.update(int32([5, 0, 70]))  # the next valid call works
    assert faults(plan, [5, 0, 70]) == []


def test_max_batch_is_the_limit():
    plan = plan_of(max_batch=4096)
    plan.update(int32([100] * 4096))
    assert faults(plan, [100] * 4096) == []
    with pytest.raises(ValueError, match=r"B at most max_batch 4096, got shape \[4097\]"):
        plan.update(int32([100] * 4097))


def test_a_query_of_another_q_len_is_refused(one_thread):
    kv = [torch.randn(70, 2, 64).bfloat16()] * 2
    cache = paged_cache(kv, kv, 16)
    plan = plan_of(q_len=1)
    plan.update(cache.seq_lens)
    with pytest.raises(ValueError, match="plan was made for q_len=1"):
        decode(torch.randn(4, 8, 64).bfloat16(), cache.k_cache, cache.v_cache, cache.page_table, plan)


# ---- torch ----


def test_opcheck():
    plan = plan_of()
    arguments = (int32([5, 700]), plan.map, *plan._shape())
    torch.library.opcheck(torch.ops.hpc_attention.plan_update.default, arguments)


def test_compiles_as_one_graph():
    plan = plan_of()
    update = torch.compile(plan.update, fullgraph=True, backend="eager")
    for batch in ([5, 700], [9, 10, 4096]):
        update(int32(batch))
        assert faults(plan, batch) == [] and plan.batch == len(batch)
