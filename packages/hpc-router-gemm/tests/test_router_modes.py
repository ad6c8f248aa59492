"""Modes of torch that a caller may be in: recording gradients, other defaults, inference mode."""

from collections.abc import Iterator

import pytest
import torch
from hpc_common.testing import device_params
from hpc_router_gemm import RouterWeight, linear, route, router_gemm
from hpc_router_gemm.support import SUPPORT

DEVICES = device_params(SUPPORT, "router_gemm", "fp32 weight, terms 1 to 3")
pytestmark = pytest.mark.usefixtures("one_thread")

M, N, K = 4, 12, 64


def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K] bf16, weight [N, K] fp32 and bias [N] fp32."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((M, K), (N, K), (N,))
    x, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes)
    return x.bfloat16().to(device), weight.to(device), bias.to(device)


def results(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    """What every operator returns."""
    w = RouterWeight(weight)
    groups = dict(bias=bias, num_groups=3, topk_groups=2)
    return [linear(x, weight), router_gemm(x, w), *route(x, w, 3), *route(x, w, 3, **groups)]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_no_gradient(device: str) -> None:
    x, weight, bias = inputs(device)
    want = results(x, weight, bias)
    parameters = [torch.nn.Parameter(each.clone()) for each in (x, weight, bias)]
    got = results(*parameters)
    assert_same(got, want)
    assert not any(each.requires_grad or each.grad_fn for each in got)
    # Inputs on a graph, no leaves.
    got = results(*(each * 1.0 for each in parameters))
    assert_same(got, want)
    assert not any(each.requires_grad or each.grad_fn for each in got)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("leaf", [True, False])
def test_out_records_nothing(leaf: bool, device: str) -> None:
    x, weight, _ = inputs(device)
    out = torch.zeros((M, N), dtype=torch.float32, device=device, requires_grad=leaf)
    x.requires_grad_()
    assert router_gemm(x, RouterWeight(weight), out=out) is out
    assert out.grad_fn is None and out.requires_grad == leaf
    assert torch.equal(out, linear(x, weight, terms=2)) and out.detach().any()


@pytest.fixture
def bf16_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def test_default_dtype(bf16_default: None) -> None:
    got = results(*inputs("cpu"))
    torch.set_default_dtype(torch.float32)
    assert_same(got, results(*inputs("cpu")))


@pytest.mark.parametrize("device", DEVICES)
def test_default_device(device: str) -> None:
    tensors = inputs(device)
    want = results(*tensors)
    with torch.device("meta"):
        got = results(*tensors)
    assert_same(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_weight_made_in_inference_mode(device: str) -> None:
    x, weight, _ = inputs(device)
    with torch.inference_mode():
        w = RouterWeight(weight.clone(), terms=3)
        w.presplit()
    assert not w.weight.is_inference() and not w.presplit().is_inference()
    assert not RouterWeight(torch.nn.Parameter(weight)).weight.requires_grad
    address, new = w.weight.data_ptr(), weight.flip(0).contiguous()
    w.update_(new)
    assert w.weight.data_ptr() == address
    assert torch.equal(router_gemm(x, w), router_gemm(x, RouterWeight(new, terms=3)))
    assert torch.equal(w.presplit(), RouterWeight(new, terms=3).presplit())
    with torch.inference_mode():
        w.update_(weight)
    assert torch.equal(router_gemm(x, w), router_gemm(x, RouterWeight(weight, terms=3)))
