"""Kinds of fault that users of such operators met, each as a test of its kind; and faults planted on purpose.

The planted ones show that the bound of ``Inputs.check`` is tight enough to see them.
"""

from dataclasses import replace

import pytest
import torch
from hpc_attention import DecodePlan, _cpu, decode
from hpc_attention.support import FP8
from hpc_attention.testing import Inputs, Problem, devices, on_devices
from hpc_common.poison import Canary, bits, dirty_, fill_nan_, paged_cache
from hpc_common.schedule import CTA, HEADER, REQUEST

pytestmark = pytest.mark.usefixtures("one_thread")
BF16 = torch.bfloat16


def swap_heads(inputs: Inputs) -> Inputs:
    """The same problem with the two KV heads (and their groups of query heads) exchanged."""
    group = inputs.problem.num_q_heads // 2
    order = torch.arange(inputs.problem.num_q_heads).roll(group).to(inputs.q.device)
    device = inputs.q.device
    cache = paged_cache(
        [k.flip(1) for k in inputs.keys], [v.flip(1) for v in inputs.values], inputs.problem.page_size, device=device
    )
    return replace(inputs, q=inputs.q[:, order], cache=cache, _reference=None)


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices(
        Problem((4096, 130), num_q_heads=16, num_kv_heads=2, head_dim=64, batch_invariant=invariant)
        for invariant in (True, False)
    ),
)
def test_kv_heads_are_offset_on_every_axis(problem: Problem, device: str) -> None:
    """Split requests with several KV heads: exchanging the heads exchanges the results (A1)."""
    inputs = problem.make(device)
    inputs.keys = [torch.stack([k[:, 0], (k[:, 1].to(torch.float32) * 4).to(k.dtype)], 1) for k in inputs.keys]
    inputs.cache = paged_cache(inputs.keys, inputs.values, problem.page_size, device=device)
    out, lse = inputs.run()
    inputs.check(out, lse)
    swapped = swap_heads(inputs)
    other, other_lse = swapped.run()
    swapped.check(other, other_lse)
    if problem.batch_invariant:  # cuts are the same for every head: the very same bits
        assert torch.equal(other, out.roll(8, 1)) and torch.equal(other_lse, lse.roll(8, 1))


@pytest.mark.parametrize("length", [1024, 16_384, 131_072])
@pytest.mark.parametrize("device", devices(Problem(kv_dtype=FP8)))
def test_error_does_not_grow_with_the_length(length: int, device: str) -> None:
    """Uniform weights over values that alternate between 1.125 and -1: the mean is 0.0625 at every length (A5)."""
    keys = torch.zeros(length, 1, 128).to(FP8)
    values = torch.tensor([1.125, -1.0]).repeat(length // 2).view(-1, 1, 1).expand(-1, 1, 128).to(FP8)
    cache = paged_cache([keys], [values.contiguous()], 64, device=device)
    plan = DecodePlan(
        max_batch=1, num_q_heads=8, num_kv_heads=1, head_dim=128, page_size=64, kv_dtype=FP8, device=device
    )
    plan.update(cache.seq_lens)
    q = torch.ones(1, 8, 128, dtype=BF16, device=device)
    out = decode(q, cache.k_cache, cache.v_cache, cache.page_table, plan)
    assert float((out.to(torch.float32) - 0.0625).abs().max()) <= 2.0**-14  # 0.0625 is exact in bf16


@pytest.mark.parametrize("device", devices(Problem(kv_dtype=FP8, batch_invariant=True), Problem()))
@pytest.mark.parametrize("invariant", [False, True])
def test_a_plan_follows_new_lengths_and_pages(device: str, invariant: bool) -> None:
    """A plan updated in place serves the new batch, not the one it was first used for (A20)."""
    first = Problem((4096, 1, 1, 1), kv_dtype=FP8, batch_invariant=invariant, max_seq_len=8192).make(device)
    first.check(*first.run())
    second = Problem((1, 1, 1, 8192), kv_dtype=FP8, batch_invariant=invariant, max_seq_len=8192, seed=1).make(device)
    first.plan.update(second.cache.seq_lens)
    reused, reused_lse = second.run(plan=first.plan)
    second.check(reused, reused_lse)
    fresh, fresh_lse = second.run()
    assert torch.equal(reused, fresh) and torch.equal(reused_lse, fresh_lse)
    shorter = Problem((300, 7), kv_dtype=FP8, seed=2).make(device)  # a smaller batch than max_batch
    first.plan.update(shorter.cache.seq_lens)
    shorter.check(*shorter.run(plan=first.plan))


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices(
        replace(Problem((4096, 130, 0, 700), kv_dtype=FP8, num_q_heads=16, num_kv_heads=2), batch_invariant=invariant)
        for invariant in (True, False)
    ),
)
def test_what_the_workspace_holds_never_matters(problem: Problem, device: str) -> None:
    """Garbage, NaN or an earlier call's partial results: the same bits; and no byte outside it is written."""
    inputs = problem.make(device)
    out, lse = inputs.run()
    arguments = dict(
        max_batch=4, num_q_heads=16, num_kv_heads=2, head_dim=128, page_size=64, kv_dtype=FP8,
        batch_invariant=problem.batch_invariant, max_seq_len=4096,
    )  # fmt: skip
    needed = DecodePlan.sizes(**arguments, device=device).workspace_bytes
    with Canary((needed,), device=device) as workspace:
        plan = DecodePlan(**arguments, device=device, workspace=workspace)
        plan.update(inputs.cache.seq_lens)
        for spoil in (lambda: dirty_(workspace, 1), lambda: fill_nan_(workspace.view(torch.float32)), lambda: None):
            spoil()
            again, again_lse = inputs.run(plan=plan)
            assert torch.equal(again, out) and torch.equal(again_lse, lse)
        with pytest.raises(ValueError, match="workspace: expected at least"):
            DecodePlan(**arguments, device=device, workspace=workspace[:-1])


@pytest.mark.parametrize(("problem", "device"), on_devices([Problem((257, 90), num_q_heads=8, num_kv_heads=2)]))
def test_strided_views_are_read_by_their_strides(problem: Problem, device: str) -> None:
    """q cut from a fused projection, keys with other strides than values, page tables cut from a larger one (A24)."""
    inputs = problem.make(device)
    out, lse = inputs.run()
    fused = torch.full((2, (8 + 2 * 2) * 128), float("nan"), dtype=BF16, device=device)
    fused[:, : 8 * 128] = inputs.q.flatten(1)
    q = fused[:, : 8 * 128].view(2, 8, 128)
    wide = torch.full((*inputs.cache.k_cache.shape[:2], 3, 136), float("nan"), dtype=BF16, device=device)
    keys = wide[:, :, :2, :128]
    keys.copy_(inputs.cache.k_cache)
    table = torch.full((2, 40), -1, dtype=torch.int32, device=device)
    table[:, : inputs.cache.page_table.shape[1]] = inputs.cache.page_table
    for _ in range(2):  # a second call sees no cached copy of the first
        again, again_lse = inputs.run(q=q, k_cache=keys, page_table=table[:, : inputs.cache.page_table.shape[1]])
        assert torch.equal(again, out) and torch.equal(again_lse, lse)


@pytest.mark.parametrize(("problem", "device"), on_devices([Problem((700, 130), num_kv_heads=2, k_scale="head")]))
def test_inputs_are_left_alone(problem: Problem, device: str) -> None:
    inputs = problem.make(device)
    tensors = [inputs.q, inputs.cache.k_cache, inputs.cache.v_cache, inputs.cache.page_table, inputs.plan.map]
    before = [bits(tensor).clone() for tensor in tensors]
    inputs.run()
    assert all(torch.equal(bits(tensor), old) for tensor, old in zip(tensors, before, strict=True))


# ---- Planted faults ----

PLANTED = Problem((4096, 200, 130), num_q_heads=8, num_kv_heads=2, kv_dtype=FP8, k_scale="head", v_scale="head")


def rows_of_map(inputs: Inputs) -> torch.Tensor:
    """The map's CTA rows, int32 [num_ctas, 4], sharing its memory."""
    begin = HEADER.itemsize + (inputs.plan.max_batch + 1) * REQUEST.itemsize
    size = inputs.plan.num_ctas * CTA.itemsize
    return inputs.plan.map[begin : begin + size].view(torch.int32).view(-1, 4)


def unnoticed(inputs: Inputs, **changes: object) -> bool:
    """Whether ``check`` passes a result of changed arguments against the reference of the unchanged ones."""
    inputs.reference()
    out, lse = inputs.run(**changes)
    noticed = 0
    for result in ((out, None), (inputs.reference()[0].to(BF16), lse)):
        try:
            inputs.check(*result)
        except AssertionError:
            noticed += 1
    return not noticed


def test_nothing_planted_passes() -> None:
    assert unnoticed(PLANTED.make())


def test_a_dropped_last_tile_is_noticed() -> None:
    inputs = PLANTED.make()
    inputs.reference()
    last = int(inputs.plan.host_map().used_ctas) - 1
    rows_of_map(inputs)[last, 3] -= 1
    assert not unnoticed(inputs)


def test_a_dropped_tile_in_the_middle_of_a_long_request_is_noticed() -> None:
    inputs = PLANTED.make()
    inputs.reference()
    rows_of_map(inputs)[3, 3] -= 1
    assert not unnoticed(inputs)


def test_two_exchanged_pages_are_noticed_only_where_it_matters() -> None:
    """Whole pages of one request may change places without a change of the sum; those of two requests may not."""
    inputs = PLANTED.make()
    table = inputs.cache.page_table.clone()
    table[0, [1, 2]] = table[0, [2, 1]]
    assert unnoticed(inputs, page_table=table)
    table = inputs.cache.page_table.clone()
    table[0, 1], table[1, 1] = inputs.cache.page_table[1, 1], inputs.cache.page_table[0, 1]
    assert not unnoticed(inputs, page_table=table)


def test_a_page_of_keys_not_of_its_values_is_noticed() -> None:
    inputs = PLANTED.make()
    pages = inputs.cache.page_table[0, [1, 2]].long()
    keys = bits(inputs.cache.k_cache).clone()
    keys[pages] = keys[pages.flip(0)]
    assert not unnoticed(inputs, k_cache=keys.view(FP8))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_the_scale_of_another_head_is_noticed(name: str) -> None:
    inputs = PLANTED.make()
    assert not unnoticed(inputs, **{name: inputs.options[name].flip(0)})


def test_a_missing_rescale_in_the_combine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results added with equal weights instead of the global softmax's."""

    def mean(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return outs.mean(0), torch.logsumexp(lses, 0)

    monkeypatch.setattr(_cpu, "combine", mean)
    assert not unnoticed(PLANTED.make())


def test_a_partial_result_of_another_slot_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last piece of a split request taken from its neighbour's slot."""
    combines = _cpu.combines

    def shifted(schedule):
        for request, head, slots in combines(schedule):
            yield request, head, [*slots[:-1], slots[-1] - 2]

    monkeypatch.setattr(_cpu, "combines", shifted)
    assert not unnoticed(PLANTED.make())


def test_an_off_by_one_causal_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row sees one token less, in a request of four thousand."""
    attend = _cpu.attend

    def blind(query, keys, values, begin, row_begin, row_end, key_scale, options):
        return attend(query, keys, values, begin, row_begin, row_end - 1, key_scale, options)

    monkeypatch.setattr(_cpu, "attend", blind)
    assert not unnoticed(replace(PLANTED, q_len=3).make())
