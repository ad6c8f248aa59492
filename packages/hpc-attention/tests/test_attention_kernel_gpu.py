"""The decode kernels on a GPU: every instantiation, captured steps, early starts, streams, devices, far addresses."""

from dataclasses import replace

import pytest
import torch
from hpc_attention import DecodePlan, decode
from hpc_attention.support import FP8
from hpc_attention.testing import Inputs, Problem, capture_step, decode_by
from hpc_common.poison import WILD_PAGE, Canary, bits, dirty_, fill_nan_

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
KINDS = ((BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8), (FP8, FP8))
SMALL = Problem(lengths=(1, 64, 700, 0, 130, 65), num_q_heads=8, num_kv_heads=2)


def run_twice(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """A checked result that a second run, over NaN and a dirty workspace, repeats bit by bit."""
    out, lse = inputs.run()
    inputs.check(out, lse)
    dirty_(inputs.plan.workspace, seed=1)
    again, again_lse = inputs.run(out=fill_nan_(torch.empty_like(out)))
    assert torch.equal(again, out) and torch.equal(again_lse, lse)
    return out, lse


def plan_like(inputs: Inputs, **changes: object) -> DecodePlan:
    """A fresh plan for the inputs' sizes."""
    problem, plan = inputs.problem, inputs.plan
    options = dict(
        q_len=plan.q_len, window=plan.window, kv_dtype=plan.kv_dtype, device=plan.device,
        batch_invariant=plan.batch_invariant, max_seq_len=plan.max_seq_len,
    )  # fmt: skip
    sizes = (plan.max_batch, problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.page_size)
    made = DecodePlan(*sizes, **{**options, **changes})
    made.update(inputs.cache.seq_lens)
    return made


@pytest.mark.parametrize("rows", [(1, 1), (8, 1), (16, 1), (12, 2), (16, 3), (16, 8)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}".replace("torch.", ""))
def test_every_kernel(kind: tuple[torch.dtype, torch.dtype], head_dim: int, rows: tuple[int, int]) -> None:
    """Every kind, head_dim and number of row tiles: 1, 8, 16, 24, 48 and 128 rows a KV head."""
    ratio, q_len = rows
    problem = replace(
        SMALL, q_dtype=kind[0], kv_dtype=kind[1], head_dim=head_dim, num_q_heads=2 * ratio, q_len=q_len, k_scale="token"
    )
    run_twice(problem.make("cuda"))


@pytest.mark.parametrize("length", [0, 1, 129, 700, 2112, 4096])
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}".replace("torch.", ""))
def test_one_request_in_clusters(kind: tuple[torch.dtype, torch.dtype], heads: int, length: int) -> None:
    """Of a plan for one short request every pair has a cluster, which adds its pieces."""
    longest = 2112 if heads == 8 else 4096
    problem = replace(
        SMALL, lengths=(min(length, longest),), q_dtype=kind[0], kv_dtype=kind[1], num_q_heads=7 * heads,
        num_kv_heads=heads, max_seq_len=longest, k_scale="token", v_scale="head", sinks=True,
    )  # fmt: skip
    inputs = problem.make("cuda")
    assert inputs.plan.num_ctas == (16 if heads == 1 else 64)
    run_twice(inputs)


@pytest.mark.parametrize("length", [0, 1, 2, 9, 16, 129, 257, 700, 2048, 3001, 4089, 4096])
@pytest.mark.parametrize(
    ("kv_dtype", "heads", "longest"), [(BF16, 1, 4096), (FP8, 1, 4096), (BF16, 8, 2048), (FP8, 8, 2048), (FP8, 8, 4096)]
)
def test_one_request_alone(kv_dtype: torch.dtype, heads: int, longest: int, length: int) -> None:
    """The same of plain calls, whose tokens are all ready before the wait; several of this step, all page sizes."""
    for q_len, page_size in ((1, 64), (2, 16 if kv_dtype == BF16 else 32), (8, 256)):
        problem = replace(
            SMALL, lengths=(min(length, longest),), kv_dtype=kv_dtype, num_q_heads=8 // q_len * heads, q_len=q_len,
            num_kv_heads=heads, max_seq_len=longest, page_size=page_size,
        )  # fmt: skip
        inputs = problem.make("cuda")
        assert inputs.plan.num_ctas == (16 if heads == 1 else 64)
        run_twice(inputs)


@pytest.mark.parametrize(("kv_dtype", "heads"), [(BF16, 1), (FP8, 1), (FP8, 8)])
def test_clusters_in_a_captured_step(kv_dtype: torch.dtype, heads: int) -> None:
    """Layers that start early, whose lengths change between replays, equal eager calls, every time."""
    problem = replace(
        SMALL, lengths=(4096,), kv_dtype=kv_dtype, num_q_heads=8 * heads, num_kv_heads=heads, max_seq_len=4096
    )
    layers = [replace(problem, seed=seed).make("cuda") for seed in (0, 1)]
    lengths, outs = layers[0].cache.seq_lens, [torch.empty_like(layer.q) for layer in layers]
    graph = capture_step(layers, outs)
    for length in (4096, 1, 0, 64, 65, 130, 2000, 4095) * 4:
        lengths.fill_(length)
        eager = plan_like(layers[0])
        want = [decode_by(layer, eager) for layer in layers]
        for _ in range(5):
            for out in outs:
                fill_nan_(out)
            graph.replay()
            assert all(torch.equal(out, expected) for out, expected in zip(outs, want, strict=True)), length


@pytest.mark.parametrize("num_ctas", [1, 2, 7, 132, 264, 1024])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_any_number_of_ctas(kv_dtype: torch.dtype, num_ctas: int) -> None:
    """One CTA with every piece, up to far more CTAs than fit on the GPU at once: up to 64 pieces of one request."""
    problem = replace(SMALL, lengths=(8192, 70, 3, 0, 700), kv_dtype=kv_dtype, num_ctas=num_ctas, sinks=True)
    run_twice(problem.make("cuda"))


@pytest.mark.parametrize("num_ctas", [1, 2, 5, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_heads_abreast(kv_dtype: torch.dtype, head_dim: int, num_ctas: int) -> None:
    """Groups of 2, 4 and 8 heads, the first pieces of a CTA and later ones, behind cut pairs and short ones."""
    problem = replace(
        SMALL, lengths=(1000, 260, 0, 700, 100, 3000), num_q_heads=16, num_kv_heads=8, head_dim=head_dim,
        kv_dtype=kv_dtype, num_ctas=num_ctas, v_scale="float",
    )  # fmt: skip
    run_twice(problem.make("cuda"))


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_large_batch_and_long_request(kv_dtype: torch.dtype) -> None:
    """4,096 requests; one request of 1,048,576 tokens, whose equal keys make the output the values' mean."""
    run_twice(Problem(lengths=tuple(i % 5 for i in range(4096)), kv_dtype=kv_dtype, num_q_heads=4).make("cuda"))
    length = 1 << 20
    values = torch.randn(length // 256, 256, 1, 128, device="cuda", dtype=BF16).to(kv_dtype)
    keys = torch.zeros_like(bits(values)).view(kv_dtype)
    table = torch.arange(length // 256, dtype=torch.int32, device="cuda")[None]
    plan = DecodePlan(1, 8, 1, 128, 256, kv_dtype=kv_dtype, device="cuda")
    plan.update(torch.tensor([length], dtype=torch.int32, device="cuda"))
    q = torch.randn(1, 8, 128, device="cuda", dtype=BF16)
    out, lse = decode(q, keys, values, table, plan, return_lse=True)
    mean = values.flatten(0, 1).double().mean(0)
    assert float((out[0].double() - mean).abs().max()) < 2.0**-8 * float(mean.abs().max()) + 2.0**-16
    torch.testing.assert_close(lse, torch.full_like(lse, length).log())


def test_captured_step_follows_lengths_and_page_table() -> None:
    """A graph of one update and four decodes equals eager calls after lengths and pages have changed (A20)."""
    inputs = replace(SMALL, lengths=(4096, 1, 1, 700), kv_dtype=FP8).make("cuda")
    cache, outs = inputs.cache, [torch.empty_like(inputs.q) for _ in range(4)]

    def step() -> None:
        inputs.plan.update(cache.seq_lens)
        for out in outs:
            decode_by(inputs, inputs.plan, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ((4096, 1, 1, 700), (1, 1, 1, 64), (3000, 0, 1, 699), (64, 1, 0, 65)):
        cache.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        cache.page_table[0, :2] = cache.page_table[0, :2].flip(0)
        for out in outs:
            fill_nan_(out)
        for _ in range(10):
            graph.replay()
        want = decode_by(inputs, plan_like(inputs))
        assert all(torch.equal(out, want) for out in outs), lengths


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_a_thousand_replays_with_early_starts(kv_dtype: torch.dtype) -> None:
    """Layers that start while the one before them ends give the bits of calls that wait, every time."""
    problem = replace(SMALL, lengths=(5000, 130, 64, 1, 900), kv_dtype=kv_dtype)
    layers = [replace(problem, seed=seed).make("cuda") for seed in (0, 1)]
    want = [decode_by(layer, layers[0].plan).clone() for layer in layers]
    outs = [torch.empty_like(out) for out in want]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            for layer, out in zip(layers, outs, strict=True):
                decode_by(layer, layers[0].plan, out)
    for _ in range(50):
        for out in outs:
            fill_nan_(out)
        graph.replay()
        assert all(torch.equal(out, expected) for out, expected in zip(outs, want, strict=True))


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_a_thousand_replays_with_changing_lengths(kv_dtype: torch.dtype) -> None:
    """One plan, made anew in every replay: each gives the bits of an eager call with the lengths that it finds."""
    inputs = replace(SMALL, lengths=(5000, 130, 64, 1, 900), kv_dtype=kv_dtype).make("cuda")
    lengths = inputs.cache.seq_lens
    batches = [lengths.clone(), lengths // 2, lengths // 3, *(lengths.clamp(max=most) for most in (0, 1, 64, 65, 700))]
    want = []
    for batch in batches:
        lengths.copy_(batch)
        want.append(bits(decode_by(inputs, plan_like(inputs))).clone())
    out = torch.empty_like(inputs.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.plan.update(lengths)
        for _ in range(2):
            decode_by(inputs, inputs.plan, out)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(1000):
        lengths.copy_(batches[step % len(batches)])
        fill_nan_(out)
        graph.replay()
        different += (bits(out) != want[step % len(batches)]).sum()
    assert int(different) == 0


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_with_out_nothing_is_allocated(batch_invariant: bool) -> None:
    inputs = replace(SMALL, kv_dtype=FP8, batch_invariant=batch_invariant, max_seq_len=1024).make("cuda")
    out = torch.empty_like(inputs.q)
    decode_by(inputs, inputs.plan, out)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    decode_by(inputs, inputs.plan, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_this_steps_token_may_be_written_just_before() -> None:
    """In a graph, the newest token's key and value come from the kernel right before decode."""
    inputs = replace(SMALL, lengths=(700, 65, 64), num_kv_heads=1).make("cuda")
    cache = inputs.cache
    last = cache.seq_lens.long() - 1
    pages = cache.page_table.long()[torch.arange(3, device="cuda"), last // 64]
    values = torch.empty(3, 1, 128, dtype=BF16, device="cuda")
    out = torch.empty_like(inputs.q)
    decode_by(inputs, inputs.plan, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            cache.v_cache[pages, last % 64] = values
            decode_by(inputs, inputs.plan, out)
    for seed in range(20):
        values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)) * 100)
        cache.v_cache[pages, last % 64] = 0
        graph.replay()
        assert torch.equal(out, decode_by(inputs, plan_like(inputs))), seed


def test_two_plans_on_two_streams() -> None:
    """Plans share nothing: interleaved calls on two streams give what each gives alone."""
    both = [replace(SMALL, lengths=(3000, 200), seed=seed, kv_dtype=FP8).make("cuda") for seed in (0, 1)]
    want = [decode_by(inputs, inputs.plan).clone() for inputs in both]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs = []
    for _ in range(50):
        for inputs, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append(decode_by(inputs, inputs.plan))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want[i % 2]) for i, out in enumerate(outs))


def test_beside_kernels_that_fill_the_gpu() -> None:
    """Other work that holds every SM makes decode late, not wrong: no CTA waits for another that is not there."""
    inputs = replace(SMALL, lengths=(9000, 130, 70, 1), kv_dtype=FP8).make("cuda")
    want = decode_by(inputs, inputs.plan).clone()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(want)
    with torch.cuda.graph(graph):
        for _ in range(8):
            decode_by(inputs, inputs.plan, out)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        fill_nan_(out)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(4):
                matrix @ matrix
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


def test_side_stream_waits_for_its_producer() -> None:
    """Work ahead in the current stream is done before the query is read (A23)."""
    inputs = SMALL.make("cuda")
    want = decode_by(inputs, inputs.plan).clone()
    query = inputs.q.clone()
    stream = torch.cuda.Stream()
    for _ in range(4):
        inputs.q.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            inputs.q.copy_(query)
            out = decode_by(inputs, inputs.plan)
        stream.synchronize()
        assert torch.equal(out, want)


def test_pages_behind_4_gib() -> None:
    """Pages at indices whose byte offsets pass 2^31 and 2^32 read like the same pages at 0 .. 3 (A17)."""
    shape = (65_540, 64, 8, 128)  # 4.3 GB each
    far = [32_767, 32_768, 65_535, 65_537]
    keys, values = (torch.empty(shape, dtype=torch.uint8, device="cuda") for _ in range(2))
    for cache in (keys, values):
        small = torch.randn(4, *shape[1:], device="cuda").to(FP8).view(torch.uint8)
        cache[:4] = small
        cache[far] = small
    q = torch.randn(1, 64, 128, device="cuda", dtype=BF16)
    plan = DecodePlan(1, 64, 8, 128, 64, kv_dtype=FP8, device="cuda")
    plan.update(torch.tensor([250], dtype=torch.int32, device="cuda"))
    tables = (torch.tensor([row], dtype=torch.int32, device="cuda") for row in ([0, 1, 2, 3], far))
    near, wide = (decode(q, keys.view(FP8), values.view(FP8), table, plan) for table in tables)
    assert torch.equal(near, wide)


def test_wild_pages_and_lengths_touch_nothing_else() -> None:
    """Ids outside the pool and a length beyond the page table leave the other requests' bits alone."""
    inputs = replace(SMALL, lengths=(130, 64, 700, 65), kv_dtype=FP8).make("cuda")
    want = decode_by(inputs, inputs.plan).clone()
    inputs.cache.page_table[1] = WILD_PAGE
    inputs.cache.page_table[3] = -5
    plan = plan_like(inputs)
    lengths = inputs.cache.seq_lens.clone()
    lengths[3] = 1 << 20
    plan.update(lengths)
    out = decode_by(inputs, plan)
    torch.cuda.synchronize()
    torch.testing.assert_close(out[[0, 2]], want[[0, 2]], rtol=2.0**-7, atol=2.0**-10)
    assert torch.equal(decode_by(inputs, inputs.plan)[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_workspace_between_canaries(batch_invariant: bool) -> None:
    """The kernels stay inside the workspace that the plan asks for (A2)."""
    problem = replace(
        SMALL, lengths=(5000, 700, 64), num_q_heads=6, q_len=3, batch_invariant=batch_invariant, max_seq_len=8192
    )
    inputs = problem.make("cuda")
    want = decode_by(inputs, inputs.plan)
    with Canary((inputs.plan.workspace_bytes,), device="cuda") as workspace:
        out = decode_by(inputs, plan_like(inputs, workspace=workspace))
        torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_batch_invariant_rows_in_any_company() -> None:
    """A request's bits are the same alone and beside others, pieces combined or not (A13, A14)."""
    lengths = (4096, 130, 20000, 1, 900, *range(1, 90, 3))
    for kv_dtype in (BF16, FP8):
        problem = replace(SMALL, lengths=lengths, kv_dtype=kv_dtype, batch_invariant=True, max_seq_len=32768)
        inputs = problem.make("cuda")
        out = decode_by(inputs, inputs.plan)
        for request in (0, 1, 2, 4):
            plan = DecodePlan(
                1, 8, 2, 128, 64, kv_dtype=kv_dtype, device="cuda", batch_invariant=True, max_seq_len=32768
            )
            plan.update(inputs.cache.seq_lens[request : request + 1].contiguous())
            rows = slice(request, request + 1)
            alone, _ = inputs.run(q=inputs.q[rows], page_table=inputs.cache.page_table[rows], plan=plan)
            assert torch.equal(alone, out[rows]), request


def test_second_gpu_while_the_first_is_current() -> None:
    """Tensors on cuda:1 while cuda:0 is current; a plan of the other device is refused (A22)."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = replace(SMALL, kv_dtype=FP8)
    inputs = problem.make("cuda:1")
    with torch.cuda.device(0):
        run_twice(inputs)
        with pytest.raises(ValueError, match="cuda:0"):
            decode_by(inputs, problem.make("cuda:0").plan)
