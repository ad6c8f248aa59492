"""Modes of torch that a caller may be in: recording gradients, other defaults, inference mode."""

from collections.abc import Callable, Iterator
from typing import Any

import hpc_moe
import pytest
import torch

CaseMaker = Callable[..., Any]
E4M3 = torch.float8_e4m3fn


def with_parameters(case: Any) -> Any:
    """The case with a Parameter for every floating-point tensor."""

    def parameter(tensor: Any) -> Any:
        floating = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        return torch.nn.Parameter(tensor) if floating else tensor

    if case.quant is not None:
        case = case.scales(**{name: parameter(value) for name, value in vars(case.quant).items()})
    return case.but(**{name: parameter(getattr(case, name)) for name in ("x", "w13", "w2", "topk_weights")})


def test_no_gradient(moe_case: CaseMaker, kind: Any) -> None:
    case = moe_case(kind, tokens=5)
    shared = torch.ones(case.x.shape, dtype=torch.bfloat16, device=case.x.device)
    want = case.run(shared_output=shared)
    got = with_parameters(case).run(shared_output=torch.nn.Parameter(shared))
    assert torch.equal(got, want)
    assert not got.requires_grad and got.grad_fn is None


@pytest.mark.parametrize("leaf", [True, False])
def test_out_records_nothing(moe_case: CaseMaker, kind: Any, leaf: bool) -> None:
    case = moe_case(kind, tokens=5)
    want = case.run()
    out = torch.zeros(case.x.shape, dtype=torch.bfloat16, device=case.x.device, requires_grad=leaf)
    assert with_parameters(case).run(out=out) is out
    assert torch.equal(out, want)
    assert out.grad_fn is None and out.requires_grad == leaf


@pytest.fixture
def bf16_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_default_dtype(moe_case: CaseMaker, kind: Any, batch_invariant: bool, bf16_default: None) -> None:
    case = moe_case(kind, tokens=5)
    want = case.run(batch_invariant=batch_invariant)
    torch.set_default_dtype(torch.bfloat16)
    assert torch.equal(case.run(batch_invariant=batch_invariant), want)


@pytest.mark.parametrize("tokens", [5, 150])  # x quantised where a tile reads it, and in the workspace
def test_default_device(moe_case: CaseMaker, kind: Any, tokens: int) -> None:
    case = moe_case(kind, tokens=tokens)
    want = case.run()
    with torch.device("meta"):
        got = case.run()
    assert got.device == case.x.device and torch.equal(got, want)


def test_workspace_made_in_inference_mode(moe_case: CaseMaker, kind: Any) -> None:
    case = moe_case(kind, tokens=5)
    with torch.inference_mode():
        workspace = hpc_moe.MoeWorkspace(
            5, 4, 8, 384, 256, hpc_moe.quant.quant_name(case.quant), x_dtype=case.x.dtype, device=case.x.device
        )
    assert torch.equal(case.run(workspace=workspace), case.run())
