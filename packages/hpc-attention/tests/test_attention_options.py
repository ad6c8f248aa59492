"""decode's options: each is honoured exactly, alone and beside the others."""

from dataclasses import replace

import pytest
import torch
from hpc_attention import DecodePlan, decode
from hpc_attention.support import FP8
from hpc_attention.testing import Problem, devices, on_devices
from hpc_common.poison import paged_cache
from hpc_common.reference import attention as reference

pytestmark = pytest.mark.usefixtures("one_thread")
BF16 = torch.bfloat16
BASE = Problem(lengths=(257, 0, 70, 1000), num_q_heads=12, num_kv_heads=3)
FP8_BASE = replace(BASE, kv_dtype=FP8)


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices(
        replace(base, **option)
        for base in (BASE, FP8_BASE, replace(FP8_BASE, q_dtype=FP8, q_len=3))
        for option in (
            {"sm_scale": 0.05},
            {"sm_scale": -0.3},
            {"softcap": 2.0},
            {"softcap": 50.0, "sm_scale": 0.3},
            {"sinks": True},
            {"k_scale": "float"},
            {"k_scale": "one"},
            {"k_scale": "head"},
            {"k_scale": "token"},
            {"v_scale": "float"},
            {"v_scale": "one"},
            {"v_scale": "head"},
            {"sinks": True, "softcap": 5.0, "k_scale": "token", "v_scale": "head", "window": 100},
        )
    ),
)
def test_options(problem: Problem, device: str) -> None:
    inputs = problem.make(device)
    out, lse = inputs.run()
    inputs.check(out, lse)


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices(
        replace(FP8_BASE, lengths=(200, 90), **option)
        for option in ({"sm_scale": 0.05}, {"softcap": 1.0}, {"sinks": True}, {"k_scale": "head"}, {"v_scale": "head"})
    ),
)
def test_an_option_left_out_is_noticed(problem: Problem, device: str) -> None:
    """The bound of the tests above is tight enough: without the option the result is outside it (A30)."""
    inputs = problem.make(device)
    without = {name: None for name in inputs.options if name != "q_scale"}
    with pytest.raises(AssertionError, match="out:"):
        inputs.check(inputs.run(**without)[0])


@pytest.mark.parametrize(("problem", "device"), on_devices([replace(BASE, q_len=2)]))
def test_lse_is_optional_and_out_is_written(problem: Problem, device: str) -> None:
    inputs = problem.make(device)
    out, _ = inputs.run()
    alone = inputs.run(return_lse=False)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, out) and alone.dtype == BF16
    wide = torch.full((out.shape[0], 15, 136), 7.0, dtype=BF16, device=device)  # rows with a gap behind each
    view = wide[:, :12, :128]
    result, _ = inputs.run(out=view)
    assert result.data_ptr() == wide.data_ptr() and torch.equal(view, out)
    assert bool((wide[:, 12:] == 7).all()) and bool((wide[:, :, 128:] == 7).all())


@pytest.mark.parametrize(("problem", "device"), on_devices([BASE]))
def test_lse_leaves_the_sinks_out(problem: Problem, device: str) -> None:
    inputs = problem.make(device)
    sinks = torch.full((12,), 3.0, device=device)
    plain_out, plain_lse = inputs.run()
    out, lse = inputs.run(sinks=sinks)
    assert torch.equal(lse, plain_lse)
    share = 1 / (1 + torch.exp(3.0 - plain_lse.cpu().to(torch.float64)))  # of the keys in the denominator
    want = plain_out.cpu().to(torch.float64) * share.unsqueeze(-1)
    # Each of the two results carries one rounding to bf16.
    assert bool(((out.cpu().to(torch.float64) - want).abs() <= 2.0**-7 * want.abs() + 2.0**-30).all())
    none, _ = inputs.run(sinks=torch.full((12,), -float("inf"), device=device))
    assert torch.equal(none, plain_out)


@pytest.mark.parametrize(("problem", "device"), on_devices([FP8_BASE]))
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_as_number_and_tensor_agree(problem: Problem, device: str, name: str) -> None:
    inputs = problem.make(device)
    by_number, _ = inputs.run(**{name: 0.75})
    by_tensor, _ = inputs.run(**{name: torch.tensor([0.75], device=device)})
    by_head, _ = inputs.run(**{name: torch.full((3,), 0.75, device=device)})
    assert torch.equal(by_tensor, by_head)
    # The two multiply in another order; a rounding to bf16 may fall the other way.
    torch.testing.assert_close(by_number, by_tensor, rtol=2.0**-7, atol=2.0**-12)


@pytest.mark.parametrize(("problem", "device"), on_devices([replace(FP8_BASE, k_scale="token", page_size=16)]))
def test_key_scales_of_unused_slots_may_be_nan(problem: Problem, device: str) -> None:
    inputs = problem.make(device)
    scale = inputs.options["k_scale"]
    assert bool(scale.isnan().any())
    out, lse = inputs.run()
    assert bool(out.isfinite().all())
    clean = scale.nan_to_num(1.0)
    assert torch.equal(inputs.run(k_scale=clean)[0], out)
    padded = torch.full((*scale.shape[:2], 5), 9.0, device=device)  # a view with gaps is read by its strides
    padded[:, :, :3] = scale
    assert torch.equal(inputs.run(k_scale=padded[:, :, :3])[0], out)


@pytest.mark.parametrize("ratio", [12, 5, 16, 1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("device", devices(*(Problem(head_dim=d, num_q_heads=16, q_len=4) for d in (64, 128, 256))))
def test_four_tokens_of_any_ratio_and_head_dim(ratio: int, head_dim: int, device: str) -> None:
    """Speculative verification of four tokens at the ratios that models have (A31)."""
    inputs = Problem((300, 61), num_q_heads=2 * ratio, num_kv_heads=2, head_dim=head_dim, q_len=4).make(device)
    inputs.check(*inputs.run())


# ---- Batch invariance and repeatability ----


def batch(
    lengths: list[int], heads: tuple[int, int], device: str, invariant: bool, seed: int = 0, **options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, spread) where request r's tensors are a function of r alone, whatever its neighbours are."""
    q_heads, kv_heads = heads

    def draw(request: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + request)).to(BF16)

    longest = max(lengths)
    keys = [draw(3 * r, 8192, kv_heads, 64)[:n] for r, n in enumerate(lengths)]
    values = [draw(3 * r + 1, 8192, kv_heads, 64)[:n] for r, n in enumerate(lengths)]
    q = torch.cat([draw(3 * r + 2, 1, q_heads, 64) for r in range(len(lengths))]).to(device)
    cache = paged_cache(keys, values, 16, seed=len(lengths), device=device)
    plan = DecodePlan(
        max_batch=len(lengths), num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=64, page_size=16, kv_dtype=BF16,
        device=device, batch_invariant=invariant, max_seq_len=max(longest, 8192), **options,
    )  # fmt: skip
    plan.update(cache.seq_lens)
    out, lse = decode(q, cache.k_cache, cache.v_cache, cache.page_table, plan, return_lse=True)
    arguments = (q, cache.k_cache, cache.v_cache.abs(), cache.page_table, cache.seq_lens)
    return out, lse, reference.decode(*arguments)[0]


INVARIANT = devices(Problem(batch_invariant=True, head_dim=64))


@pytest.mark.parametrize("device", INVARIANT)
def test_another_requests_length_changes_nothing_when_batch_invariant(device: str) -> None:
    """Rows 1 to 3 are bit-identical while request 0 changes (A13)."""
    first, first_lse, _ = batch([900, 1000, 120, 500], (32, 8), device, True)
    second, second_lse, _ = batch([800, 1000, 120, 500], (32, 8), device, True)
    assert torch.equal(first[1:], second[1:]) and torch.equal(first_lse[1:], second_lse[1:])
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("device", INVARIANT)
def test_alone_or_with_others_when_batch_invariant(device: str) -> None:
    """A request of 4,096 tokens alone and before 31 others gives the same bits (A14), on any number of CTAs."""
    others = [int(n) for n in torch.randint(1, 600, (31,), generator=torch.Generator().manual_seed(5))]
    alone, alone_lse, _ = batch([4096], (8, 2), device, True)
    for num_ctas in (None, 7):
        crowd, crowd_lse, _ = batch([4096, *others], (8, 2), device, True, num_ctas=num_ctas)
        assert torch.equal(crowd[:1], alone) and torch.equal(crowd_lse[:1], alone_lse)


@pytest.mark.parametrize("device", devices(Problem(head_dim=64)))
def test_another_requests_length_stays_within_rounding_otherwise(device: str) -> None:
    """Without batch_invariant cuts may move: results differ by one rounding each, no more (A13)."""
    first, _, spread = batch([900, 4000, 120, 500], (8, 2), device, False)
    second, _, _ = batch([8000, 4000, 120, 500], (8, 2), device, False)
    bound = 2.0**-7 * first[1:].abs() + (2.0**-17 if device == "cpu" else 2.0**-7) * spread[1:].to(device)
    assert bool(((first[1:].to(torch.float64) - second[1:]).abs() <= bound).all())


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("device", INVARIANT)
def test_the_same_inputs_give_the_same_bits(device: str, invariant: bool) -> None:
    results = [batch([4096, 70, 1, 900], (8, 2), device, invariant)[:2] for _ in range(3)]
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)
