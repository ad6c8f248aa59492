"""One CPU call of one operator in an environment that has only its wheel, hpc-common and torch.

Run by .ci/isolation.sh with the module's name: ``python isolated_call.py hpc_moe``. Not collected by pytest.
"""

import importlib
import importlib.util
import sys

import torch


def attention(module) -> None:
    """Two requests, one of length 0, against a softmax written out here."""
    torch.manual_seed(0)
    plan = module.DecodePlan(max_batch=2, num_q_heads=2, num_kv_heads=1, head_dim=64, page_size=16, device="cpu")
    cache = torch.randn(4, 16, 1, 64).to(torch.bfloat16)
    q = torch.randn(2, 2, 64).to(torch.bfloat16)
    plan.update(torch.tensor([20, 0], dtype=torch.int32))
    table = torch.tensor([[2, 0], [0, 0]], dtype=torch.int32)
    out = module.decode(q, cache, cache, table, plan)
    keys = torch.cat([cache[2, :, 0], cache[0, :4, 0]]).double()
    want = torch.softmax(q[0].double() @ keys.T / 8, -1) @ keys
    assert (out[0].double() - want).abs().max() < 0.02, (out[0].double() - want).abs().max()
    assert out[1].eq(0).all()


def router_gemm(module) -> None:
    """Scores of a small router against float64."""
    torch.manual_seed(0)
    x = torch.randn(3, 64).to(torch.bfloat16)
    weight = torch.randn(5, 64)
    scores = module.router_gemm(x, module.RouterWeight(weight, terms=3))
    want = x.double() @ weight.double().T
    assert scores.dtype == torch.float32 and (scores.double() - want).abs().max() < 1e-4


def moe(module) -> None:
    """Two bf16 experts, one token each, against plain products."""
    torch.manual_seed(0)
    x = torch.randn(2, 128).to(torch.bfloat16)
    w13, w2 = torch.randn(2, 128, 128).to(torch.bfloat16) / 8, torch.randn(2, 128, 64).to(torch.bfloat16) / 8
    ids = torch.tensor([[1], [0]], dtype=torch.int32)
    out = module.fused_moe(x, w13, w2, ids, torch.ones(2, 1), quant=None)
    for token, expert in enumerate([1, 0]):
        gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
        want = w2[expert].double() @ (torch.nn.functional.silu(gate) * up)
        assert (out[token].double() - want).norm() < 0.02 * want.norm()


CALLS = {"hpc_attention": attention, "hpc_router_gemm": router_gemm, "hpc_moe": moe}

if __name__ == "__main__":
    name = sys.argv[1]
    operator = importlib.import_module(name)
    present = [other for other in CALLS if other != name and importlib.util.find_spec(other)]
    assert not present, f"this environment should hold {name} alone, it has {present}"
    CALLS[name](operator)
    print(f"{name} {operator.__version__}: imported and ran alone, torch {torch.__version__}")
