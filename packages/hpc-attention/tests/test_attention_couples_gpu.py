"""Clusters of two CTAs on a GPU: pairs cut in two that are added there, alone and beside the combine kernel's."""

from dataclasses import replace

import pytest
import torch
from hpc_attention import DecodePlan
from hpc_attention.support import FP8
from hpc_attention.testing import Problem, capture_step, decode_by
from hpc_common.poison import dirty_, fill_nan_
from hpc_common.schedule import plan_decode

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
EQUAL = Problem(lengths=(1100,) * 64, num_q_heads=8, num_kv_heads=1)
MIXED = replace(EQUAL, lengths=(*(1024,) * 7, 400, *(1000,) * 18, 1400, 0, *(1024,) * 25, 1380, 0, 1408, 140))
PROBLEMS = {
    "equal": EQUAL,
    "some of one token, some of none": replace(EQUAL, lengths=(0, 1, 64, 65, *(1100, 1000) * 28, 0)),
    "among others": replace(MIXED, num_q_heads=2, q_len=3),
    "among others, one line": replace(EQUAL, lengths=tuple(700 + 37 * i % 2500 for i in range(62))),
    "pages of 256": replace(MIXED, page_size=256),
    "none, the last piece first": replace(
        EQUAL, lengths=(64, 1280, 512, 3520, 1024, 960, 1280, 1792), num_q_heads=64, num_kv_heads=8
    ),
    "of heads": replace(EQUAL, lengths=(1100, 1200) * 4, num_q_heads=64, num_kv_heads=8),
}


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("name", PROBLEMS)
def test_pairs_in_clusters_of_two(kv_dtype: torch.dtype, name: str) -> None:
    """Within the kernels' bound; a second run, over NaN and a dirty workspace, gives the same bits."""
    inputs = replace(PROBLEMS[name], kv_dtype=kv_dtype).make("cuda")
    out, lse = inputs.run()
    inputs.check(out, lse)
    dirty_(inputs.plan.workspace, seed=1)
    again, again_lse = inputs.run(out=fill_nan_(torch.empty_like(out)))
    assert torch.equal(again, out) and torch.equal(again_lse, lse)


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_plan_kernel_writes_the_hosts_map(kv_dtype: torch.dtype) -> None:
    """Of batches that may be planned in couples: alike, uneven, with requests of no or few tokens and long ones."""
    plan = DecodePlan(66, 8, 1, 128, 64, kv_dtype=kv_dtype, device="cuda")
    generator, found = torch.Generator().manual_seed(0), 0
    for step in range(120):
        batch, mean = 56 + step % 11, (60, 300, 1000, 4000)[step % 4]
        drawn = mean + torch.randint(-mean * (step % 3) // 3, mean * (step % 3) // 3 + 1, (batch,), generator=generator)
        if step % 5 == 0:
            drawn[torch.randperm(batch, generator=generator)[:4]] = torch.tensor([0, 1, 65, 3 * mean])
        lengths = drawn.to(torch.int32)
        plan.update(lengths.cuda())
        want = plan_decode(lengths.numpy(), num_ctas=plan.num_ctas, max_batch=66, min_tiles=plan.min_tiles)
        assert plan.host_map().raw == want.raw, lengths
        found += len(want.splits) > 0 and bool((want.splits["first_cta"] % 2 == 0).all())
    assert found > 20 or plan.num_ctas != 132


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_in_a_captured_step(kv_dtype: torch.dtype) -> None:
    """Layers that start early, whose lengths change between replays, equal eager calls, every time."""
    problem = replace(EQUAL, lengths=(4096,) * 60, kv_dtype=kv_dtype)
    layers = [replace(problem, seed=seed).make("cuda") for seed in (0, 1)]
    lengths, plan = layers[0].cache.seq_lens, layers[0].plan
    eager = DecodePlan(60, 8, 1, 128, 64, kv_dtype=kv_dtype, max_seq_len=plan.max_seq_len)
    outs = [torch.empty_like(layer.q) for layer in layers]

    graph = capture_step(layers, outs)
    generator = torch.Generator().manual_seed(0)
    for most in (4096, 4096, 0, 1000, 64, 600, 3000) * 3:
        drawn = torch.full((60,), most, dtype=torch.int32)
        if most not in (4096, 1000):
            drawn = torch.randint(most // 2, most + 1, (60,), dtype=torch.int32, generator=generator)
        lengths.copy_(drawn)
        eager.update(lengths)
        want = [decode_by(layer, eager).clone() for layer in layers]
        for _ in range(5):
            for out in outs:
                fill_nan_(out)
            graph.replay()
            assert all(torch.equal(out, expected) for out, expected in zip(outs, want, strict=True)), most
