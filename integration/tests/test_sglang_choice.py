"""Qwen3-MoE's gate with the choice of experts: ids and weights, weight updates, what stays SGLang's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hpc_common.testing import device_params
from hpc_router_gemm.support import SUPPORT
from hpc_sglang import compat, counters
from hpc_sglang.router import gates
from torch import nn

EXPERTS, HIDDEN, TOKENS, TOP_K = 24, 320, 12, 4


def fill(weight: torch.Tensor, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.05)


def qwen3_moe(**settings: Any) -> nn.Module:
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.moe.topk import TopKConfig
    from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    block = Qwen3MoeSparseMoeBlock.__new__(Qwen3MoeSparseMoeBlock)  # the rest needs a server
    nn.Module.__init__(block)
    block.gate = ReplicatedLinear(HIDDEN, EXPERTS, bias=False, params_dtype=torch.bfloat16)
    block.topk = SimpleNamespace(topk_config=TopKConfig(**{"top_k": TOP_K, **settings}))
    fill(block.gate.weight)
    return block


def chosen(block: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights) of the block's choice, as SGLang's select_experts makes it (all of it: test_sglang_engine.py)."""
    config = block.topk.topk_config
    scores = block.gate(x)[0]
    assert scores.shape == (len(x), EXPERTS) and scores.dtype == torch.bfloat16  # nobody's, but of the right kind
    weights, ids = config.custom_routing_function(
        hidden_states=x, gating_output=scores, topk=config.top_k, renormalize=config.renormalize
    )
    return ids, weights


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("device", device_params(SUPPORT, "route", "bf16 weight"))
def test_gate_and_choice_in_one_call(device: str, renormalize: bool) -> None:
    block = qwen3_moe(renormalize=renormalize).to(device)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    found = gates.install(nn.Sequential(block), None, False)
    assert found.describe() == (
        "hpc_router_gemm.route for the gates and the choice of experts (1 of Qwen3MoeSparseMoeBlock), 1 bf16 term"
    )
    for seed in (1, 2):
        fill(block.gate.weight, seed)
        gates.refresh(block)
        counters.reset()
        ids, weights = chosen(block, x)
        assert counters.calls == {"router.route": 1} and ids.dtype == torch.int32
        shares = (x.double() @ block.gate.weight.double().T).softmax(1)
        best, where = shares.topk(TOP_K)
        assert ids.long().equal(where)
        want = best / best.sum(1, keepdim=True) if renormalize else best
        assert torch.allclose(weights.double(), want, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        dict(use_grouped_topk=True, num_expert_group=2, topk_group=1),
        dict(scoring_func="sigmoid"),
        dict(correction_bias=torch.zeros(EXPERTS)),
        dict(custom_routing_function=max),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_choices_stay_sglangs(settings: dict[str, Any]) -> None:
    block = qwen3_moe(**settings)
    found = gates.install(nn.Sequential(block), None, False)
    assert not found.gates and not found.left and not hasattr(block, "hpc_gate")


def test_the_choice_stays_sglangs_where_it_must_be_batch_invariant_or_is_not_given_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not gates.install(nn.Sequential(qwen3_moe()), None, True).gates
    monkeypatch.setattr(compat, "moe_runner_backend", lambda: "flashinfer_trtllm")
    assert not gates.install(nn.Sequential(qwen3_moe()), None, False).gates
