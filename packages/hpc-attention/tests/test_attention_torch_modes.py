"""Plans and operators under torch's modes: a default device, fake tensors, gradients."""

import pytest
import torch
from hpc_attention import DecodePlan, prefill
from hpc_attention.testing import Inputs, Problem
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("one_thread")
PROBLEM = Problem((130, 70), num_q_heads=4, num_kv_heads=2, head_dim=64, window=100, num_ctas=3)
SIZES = dict(max_batch=2, num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=64, window=100, num_ctas=3)


def run_prefill(inputs: Inputs, starts: torch.Tensor, **changes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One new token a request, so the problem is the decode's."""
    cache = inputs.cache
    named = dict(q=inputs.q, k_cache=cache.k_cache, v_cache=cache.v_cache, page_table=cache.page_table)
    named |= dict(cu_seqlens_q=starts, seq_lens=cache.seq_lens, max_seqlen_q=1, window=100, return_lse=True)
    return prefill(**{**named, **changes})


def test_another_default_device_changes_nothing() -> None:
    inputs, starts = PROBLEM.make(), torch.tensor([0, 1, 2], dtype=torch.int32)
    with torch.device("meta"):
        plan = DecodePlan(**SIZES, device="cpu")
        plan.update(inputs.cache.seq_lens)
        assert plan.map.device == plan.workspace.device == torch.device("cpu")
        assert "2 requests" in plan.describe()
        results = inputs.run(plan=plan), run_prefill(inputs, starts)
    for result in results:
        inputs.check(*result)


def test_a_plan_without_memory_is_refused() -> None:
    with (
        FakeTensorMode(),
        pytest.raises(
            ValueError,
            match=r"^hpc_attention.DecodePlan: device: expected real memory, got a fake tensor \(FakeTensorMode",
        ),
    ):
        DecodePlan(**SIZES, device="cpu")
    with FakeTensorMode():
        fake = torch.empty(1 << 20)
    for workspace, kind in ((fake, "fake"), (torch.empty(1 << 20, device="meta"), "meta")):
        with pytest.raises(ValueError, match=rf"DecodePlan: workspace: expected real memory, got a {kind} tensor"):
            DecodePlan(**SIZES, device="cpu", workspace=workspace)
    DecodePlan(**SIZES, device="cpu", workspace=torch.empty(1 << 20))


def test_no_gradient() -> None:
    """Inputs that require one give the same numbers, and neither results nor ``out`` nor the plan join a graph."""
    inputs, starts = PROBLEM.make(), torch.tensor([0, 1, 2], dtype=torch.int32)
    calls = (inputs.run, lambda **changes: run_prefill(inputs, starts, **changes))
    for run in calls:
        want = run()
        learned = {
            name: tensor.detach().clone().requires_grad_()
            for name, tensor in dict(q=inputs.q, k_cache=inputs.cache.k_cache, v_cache=inputs.cache.v_cache).items()
        }
        scales = dict(k_scale=torch.ones(2, requires_grad=True), v_scale=torch.ones(2, requires_grad=True))
        out = torch.empty_like(inputs.q)
        for changes in ({}, {"out": out}, {**scales, "sinks": torch.zeros(4, requires_grad=True)}):
            result = run(**learned, **changes)
            assert not any(tensor.requires_grad or tensor.grad_fn for tensor in result)
            if "sinks" not in changes:
                assert torch.equal(result[0], want[0]) and torch.equal(result[1], want[1])
        assert not out.requires_grad and not inputs.plan.workspace.requires_grad


def test_no_gradient_compiled() -> None:
    torch._dynamo.reset()
    inputs = PROBLEM.make()
    q = inputs.q.clone().requires_grad_()
    want = inputs.run()
    out, lse = torch.compile(lambda q: inputs.run(q=q), fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    assert not out.requires_grad and not lse.requires_grad
