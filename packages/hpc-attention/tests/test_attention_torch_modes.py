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
