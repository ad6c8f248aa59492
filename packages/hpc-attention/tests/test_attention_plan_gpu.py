"""plan.update on a GPU: its map equals the host planner's byte for byte, eager and replayed, over any contents."""

import os
import subprocess
import sys

import pytest
import torch
from hpc_attention import _C, DecodePlan
from hpc_common.poison import Canary, dirty_
from hpc_common.schedule import check_schedule, map_bytes
from hpc_common.strategies import lengths, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.gpu
SIZES = dict(max_batch=64, num_q_heads=64, num_kv_heads=8, head_dim=128, page_size=64)
update = torch.ops.hpc_attention.plan_update


def int32(values, device="cuda"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def host_map(batch, shape, max_batch):
    """The host planner's map as a uint8 tensor; shape as in hpc_common.strategies.shapes."""
    arguments = {**shape, "window": shape["window"] or 0}
    return torch.frombuffer(
        bytearray(_C.plan_host(torch.tensor(batch, dtype=torch.int32).numpy(), max_batch=max_batch, **arguments)),
        dtype=torch.uint8,
    )


def device_map(batch, shape, max_batch, buffer=None, device="cuda"):
    """The plan kernel's map of the same, written into ``buffer`` or a dirty new one."""
    if buffer is None:
        buffer = torch.empty(map_bytes(max_batch, shape["num_ctas"]), dtype=torch.uint8, device=device)
        dirty_(buffer)
    names = ("num_kv_heads", "q_len", "window", "max_seq_len", "num_ctas", "batch_invariant")
    arguments = [(shape[name] or 0) if name == "window" else shape[name] for name in names]
    update(int32(batch, device), buffer, *arguments, max_batch, shape["min_tiles"])
    return buffer


def expected(plan, batch):
    """The host planner's map for a plan and a batch, on the CPU."""
    names = ("num_kv_heads", "q_len", "window", "max_seq_len", "num_ctas", "batch_invariant", "min_tiles")
    return host_map(batch, {name: getattr(plan, name) for name in names}, plan.max_batch)


# ---- Equal to the host ----


@settings(max_examples=4 * settings.default.max_examples)
@given(lengths(), shapes(), st.sampled_from([0, 1, 7, 500, 4096]), st.integers(-9, 9))
def test_equals_the_host(batch, shape, spare, beyond):
    """Any batch to 4,096; lengths outside [0, max_seq_len] are cut alike."""
    if batch:
        batch = [*batch[:-1], batch[-1] + beyond]
    rows = min(max(len(batch), 1) + spare, 4096)
    have = device_map(batch, shape, rows).cpu()
    assert torch.equal(have, host_map(batch, shape, rows))
    if not shape["batch_invariant"]:
        assert check_schedule(have.numpy(), batch, max_batch=rows, **shape) == []


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_ctas", [1, 31, 132, 264, 1024])
@pytest.mark.parametrize("batch", [0, 1, 31, 32, 33, 132, 255, 256, 1023, 1024, 1025, 4095, 4096])
def test_every_launch_shape(batch, num_ctas, batch_invariant):
    """Around the edges of warps, of one request or four a thread, and of one thread block or several."""
    shape = dict(
        num_kv_heads=3, q_len=2, window=None, max_seq_len=1 << 20, num_ctas=num_ctas, batch_invariant=batch_invariant,
        min_tiles=2,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(batch)
    values = torch.randint(0, 9000, (batch,), generator=generator) * (torch.rand(batch, generator=generator) > 0.3)
    for max_batch in {max(batch, 1), 1023, 1024, 4096}:
        if max_batch >= batch:
            have = device_map(values.tolist(), shape, max_batch).cpu()
            assert torch.equal(have, host_map(values.tolist(), shape, max_batch)), max_batch


def test_largest_sums():
    """8.6e9 tiles: positions beyond 32 bits."""
    shape = dict(
        num_kv_heads=128, q_len=8, window=None, max_seq_len=1 << 20, num_ctas=1024, batch_invariant=False, min_tiles=1
    )
    batch = [1 << 20] * 4096
    assert torch.equal(device_map(batch, shape, 4096).cpu(), host_map(batch, shape, 4096))


@pytest.mark.parametrize("lengths", [[-1, -(1 << 31), 5], [(1 << 31) - 1] * 4096])
def test_lengths_outside_are_cut(lengths):
    shape = dict(
        num_kv_heads=2, q_len=1, window=1 << 20, max_seq_len=1 << 20, num_ctas=132, batch_invariant=False, min_tiles=2
    )
    assert torch.equal(device_map(lengths, shape, 4096).cpu(), host_map(lengths, shape, 4096))


# ---- Buffers, graphs, streams ----


@pytest.mark.parametrize("max_batch", [40, 3000])
def test_writes_its_map_and_nothing_else(max_batch):
    shape = dict(
        num_kv_heads=8, q_len=1, window=128, max_seq_len=1 << 20, num_ctas=264, batch_invariant=False, min_tiles=2
    )
    batch = [1000, 0, 70_000, 1] * 10
    with Canary([map_bytes(max_batch, 264)], device="cuda") as buffer:
        assert torch.equal(device_map(batch, shape, max_batch, buffer).cpu(), host_map(batch, shape, max_batch))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_plan_object_over_a_dirty_map_and_a_larger_batch(batch_invariant):
    plan = DecodePlan(**SIZES, batch_invariant=batch_invariant, max_seq_len=1 << 17)
    for batch in ([9000] * 64, [5], [], [0, 100_000, 64, 65] * 8):
        dirty_(plan.map, len(batch))
        for _ in range(2):
            plan.update(int32(batch))
            assert torch.equal(plan.map.cpu(), expected(plan, batch)) and plan.batch == len(batch)


def test_replay_follows_the_lengths():
    plan, seq_lens = DecodePlan(**SIZES), int32([4096, 1, 1, 1])
    plan.update(seq_lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(seq_lens)
    for batch in ([1, 1, 1, 8192], [0, 0, 0, 0], [1 << 20] * 4, [64, 65, 63, 128]):
        seq_lens.copy_(int32(batch))
        dirty_(plan.map)
        graph.replay()
        assert torch.equal(plan.map.cpu(), expected(plan, batch))


def test_follows_its_producer_and_leaves_its_reader_alone():
    """Back to back with PDL: each plan reads the lengths written just before, each copy sees the plan just before."""
    plan, seq_lens = DecodePlan(**SIZES), int32([0] * 64)
    batches = torch.randint(0, 100_000, (100, 64), dtype=torch.int32, device="cuda")
    maps = torch.empty(100, plan.map.numel(), dtype=torch.uint8, device="cuda")

    def steps():
        for step in range(100):
            seq_lens.copy_(batches[step])
            plan.update(seq_lens)
            maps[step].copy_(plan.map)

    steps()
    eager = maps.cpu()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    maps.zero_()
    graph.replay()
    for step in range(100):
        want = expected(plan, batches[step].tolist())
        assert torch.equal(eager[step], want) and torch.equal(maps[step].cpu(), want), step


def test_runs_on_the_current_stream():
    plan, seq_lens = DecodePlan(**SIZES), int32([1] * 8)
    late = int32([12_345] * 8)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # about 50 ms
        seq_lens.copy_(late)
        plan.update(seq_lens)
    stream.synchronize()
    assert torch.equal(plan.map.cpu(), expected(plan, [12_345] * 8))


def test_neither_allocates_nor_synchronises():
    plan, seq_lens = DecodePlan(**SIZES), int32([1000] * 64)
    plan.update(seq_lens)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.update(seq_lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.timeout(60)
def test_while_another_stream_fills_the_gpu():
    plan, seq_lens = DecodePlan(**SIZES), int32([1000] * 64)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(50):
            a @ a
    for _ in range(50):
        plan.update(seq_lens)
    assert torch.equal(plan.map.cpu(), expected(plan, [1000] * 64))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu_while_the_first_is_current():
    with torch.cuda.device(0):
        plan = DecodePlan(**SIZES, device="cuda:1")
        plan.update(int32([1000, 0, 7], "cuda:1"))
        assert torch.equal(plan.map.cpu(), expected(plan, [1000, 0, 7]))
        with pytest.raises(ValueError, match="seq_lens: expected device cuda:1 .* got device cuda:0"):
            plan.update(int32([1000], "cuda:0"))


# ---- Environment ----


def test_debug_checks_lengths_outside_a_capture(monkeypatch):
    plan, seq_lens = DecodePlan(**SIZES, max_seq_len=500), int32([5, 501])
    plan.update(seq_lens)
    assert torch.equal(plan.map.cpu(), expected(plan, [5, 500]))
    monkeypatch.setenv("HPC_DEBUG", "1")
    with pytest.raises(ValueError, match=r"seq_lens: expected lengths in \[0, 500\], got 501 \(request 1\)"):
        plan.update(seq_lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(seq_lens)


def test_without_pdl():
    """HPC_PDL is read once a process, so this one starts another."""
    code = (
        "import torch; from hpc_attention import DecodePlan\n"
        "plan = DecodePlan(8, 8, 1, 128, 64)\n"
        "plan.update(torch.tensor([1000, 0, 70_000], dtype=torch.int32, device='cuda'))\n"
        "print(plan.map.cpu().numpy().tobytes().hex())"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HPC_PDL": "0"}, capture_output=True, text=True, check=True
    )
    plan = DecodePlan(8, 8, 1, 128, 64)
    assert bytes.fromhex(child.stdout.strip()) == expected(plan, [1000, 0, 70_000]).numpy().tobytes()


def test_refusals_and_the_next_call():
    plan = DecodePlan(**SIZES)
    for wrong in (torch.ones(3, dtype=torch.int32), int32([1] * 65)):
        with pytest.raises(ValueError, match="hpc_attention.DecodePlan.update: seq_lens: expected"):
            plan.update(wrong)
    with pytest.raises(ValueError, match="map: expected 6368 bytes, got 8"):
        update(int32([1]), torch.zeros(8, dtype=torch.uint8, device="cuda"), 8, 1, 0, 1 << 20, 132, False, 64, 2)
    plan.update(int32([77]))
    assert torch.equal(plan.map.cpu(), expected(plan, [77]))
