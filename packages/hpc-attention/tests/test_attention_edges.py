"""decode where lengths, pages and batches are at their limits."""

from dataclasses import replace

import pytest
import torch
from hpc_attention import DecodePlan, decode
from hpc_attention.support import FP8, MAX_BATCH
from hpc_attention.testing import Problem, devices, on_devices
from hpc_common.poison import WILD_PAGE, bits, fill_nan_

pytestmark = pytest.mark.usefixtures("one_thread")
BF16 = torch.bfloat16
NEG_INF = float("-inf")


@pytest.mark.parametrize(
    ("problem", "device"), on_devices(Problem(lengths=(0, 1, 64), kv_dtype=kv) for kv in (BF16, FP8))
)
def test_empty_cache_is_zeros(problem: Problem, device: str) -> None:
    """A request without tokens is written too: zeros and -inf over whatever ``out`` held (A7)."""
    inputs = problem.make(device)
    out = fill_nan_(torch.empty_like(inputs.q))
    result, lse = inputs.run(out=out)
    assert result is out
    assert bool((out[0] == 0).all()) and bool((lse[0] == NEG_INF).all())
    inputs.check(out, lse)


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices([Problem(lengths=(70, 300, 5, 0, 0, 0), num_q_heads=8, num_kv_heads=2, sinks=True)]),
)
def test_padding_rows_change_nothing(problem: Problem, device: str) -> None:
    """Rows of length 0, as a captured batch has behind its live ones, are finite and leave the others alone (A8)."""
    padded = problem.make(device)
    live = 3
    plan = replace(problem, lengths=problem.lengths[:live]).make(device).plan
    out, lse = padded.run()
    alone, alone_lse = padded.run(q=padded.q[:live], page_table=padded.cache.page_table[:live], plan=plan)
    assert torch.equal(out[:live], alone) and torch.equal(lse[:live], alone_lse)
    assert bool((out[live:] == 0).all()) and bool((lse[live:] == NEG_INF).all())


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("device", devices(Problem(), Problem(kv_dtype=FP8)))
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_zero_query_is_the_mean_of_all_values(length: int, device: str, kv_dtype: torch.dtype) -> None:
    """Exactly ``length`` values enter, no boundary token more or less (A11); lse is the logarithm of their number."""
    inputs = Problem(lengths=(length,), kv_dtype=kv_dtype).make(device)
    inputs.q.zero_()
    out, lse = inputs.run()
    want = inputs.values[0].to(torch.float64).mean(0)
    torch.testing.assert_close(out[0].cpu().to(torch.float64), want.expand(8, -1), rtol=2.0**-8, atol=2.0**-16)
    torch.testing.assert_close(lse.cpu(), torch.full((1, 8), float(length)).log(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices(
        Problem(lengths=(1, 63, 65, 128, 700), kv_dtype=kv, page_size=page, q_len=q_len, layout=layout)
        for kv in (BF16, FP8)
        for page, layout in ((64, "NHD"), (16, "HND"), (256, "interleaved"), (64, "uneven"))
        for q_len in (1, 4)
    ),
)
def test_nan_in_page_tails_and_spare_pages_never_reaches_the_output(problem: Problem, device: str) -> None:
    """Bit-equal to the same run with zeros there (A12); the builder has put NaN in every unused slot."""
    inputs = problem.make(device)
    unused = ~inputs.cache.used()
    assert bool(inputs.cache.k_cache.cpu().to(torch.float32)[unused].isnan().all()) and bool(unused.any())
    dirty, dirty_lse = inputs.run()
    inputs.check(dirty, dirty_lse)
    inputs.cache.set_unused_(0.0)
    clean, clean_lse = inputs.run()
    assert torch.equal(dirty, clean) and torch.equal(dirty_lse, clean_lse)


@pytest.mark.parametrize(
    ("problem", "device"), on_devices(Problem(lengths=(400, 130), window=w, q_len=n) for w in (1, 70) for n in (1, 3))
)
def test_slots_before_the_window_may_hold_anything(problem: Problem, device: str) -> None:
    """What slid out of every row's window may be freed: NaN in its slots, and page ids of no page, change nothing."""
    inputs = problem.make(device)
    before = inputs.run()
    for request, length in enumerate(problem.lengths):
        gone = length - problem.q_len + 1 - problem.window
        slots = inputs.cache.slots(request)[:gone].to(device)
        for cache in (inputs.cache.k_cache, inputs.cache.v_cache):
            flat = bits(cache)
            word = int(bits(fill_nan_(torch.empty(1, dtype=cache.dtype))))
            flat[slots // problem.page_size, slots % problem.page_size] = word
        inputs.cache.page_table[request, : gone // problem.page_size] = WILD_PAGE
    after = inputs.run()
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


@pytest.mark.parametrize(("problem", "device"), on_devices([Problem(lengths=(5, 0, 3), q_len=8, sinks=True, window=2)]))
def test_rows_that_see_nothing(problem: Problem, device: str) -> None:
    """With fewer tokens than rows the first rows see nothing, sinks or not."""
    inputs = problem.make(device)
    out, lse = inputs.run()
    inputs.check(out, lse)
    blind = [row for request, n in enumerate(problem.lengths) for row in range(8 * request, 8 * request + 8 - n)]
    assert bool((out[blind] == 0).all()) and bool((lse[blind] == NEG_INF).all())
    assert bool(lse[[row for row in range(24) if row not in blind]].isfinite().all())


@pytest.mark.parametrize("device", devices(Problem()))
def test_no_requests(device: str) -> None:
    """B = 0 returns empty results."""
    inputs = Problem().make(device)
    inputs.plan.update(torch.zeros(0, dtype=torch.int32, device=device))
    out, lse = inputs.run(q=inputs.q[:0], page_table=inputs.cache.page_table[:0])
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8)


@pytest.mark.parametrize("device", devices(Problem()))
def test_a_batch_of_empty_requests(device: str) -> None:
    """No request has a token and the page table has no column: zeros, without reading a pool that has no page."""
    plan = DecodePlan(
        max_batch=4, num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16, kv_dtype=BF16, device=device
    )
    plan.update(torch.zeros(3, dtype=torch.int32, device=device))
    cache = torch.empty(0, 16, 2, 64, dtype=BF16, device=device)
    q = torch.ones(3, 4, 64, dtype=BF16, device=device)
    table = torch.zeros(3, 0, dtype=torch.int32, device=device)
    out, lse = decode(q, cache, cache.clone(), table, plan, return_lse=True)
    assert bool((out == 0).all()) and bool((lse == NEG_INF).all())


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices([Problem(lengths=(3,) * MAX_BATCH, num_q_heads=1, num_kv_heads=1, head_dim=64, page_size=16)]),
)
def test_the_largest_batch(problem: Problem, device: str) -> None:
    inputs = problem.make(device)
    inputs.check(*inputs.run())


@pytest.mark.parametrize(
    ("problem", "device"), on_devices([Problem(lengths=(131_072, 77), kv_dtype=FP8, head_dim=64, num_q_heads=2)])
)
def test_a_long_request_beside_a_short_one(problem: Problem, device: str) -> None:
    """One request spreads over every CTA and is combined from more than a hundred partial results."""
    inputs = problem.make(device)
    assert len(inputs.plan.host_map().pieces) > 100
    inputs.check(*inputs.run())


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices([Problem(lengths=(700, 300), num_kv_heads=2), Problem(lengths=(700, 300), q_len=2)]),
)
def test_extreme_scores(problem: Problem, device: str) -> None:
    """Scores of thousands: the softmax becomes a choice of one key, and nothing overflows."""
    inputs = replace(problem, sm_scale=40.0).make(device)
    out, lse = inputs.run()
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    want, want_lse, _ = inputs.reference()
    torch.testing.assert_close(lse.cpu().to(torch.float64), want_lse, rtol=2.0**-18, atol=0)
    # A score of 10^3 to 10^4 is known to 2^-24 of itself only, so near ties may turn; most rows have none.
    near = ((out.cpu().to(torch.float64) - want).abs() <= 2.0**-6 * (1 + want.abs())).all(-1)
    assert near.to(torch.float32).mean() > 0.8
