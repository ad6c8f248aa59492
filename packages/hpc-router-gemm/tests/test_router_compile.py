"""torch.library registration: opcheck, torch.compile with the whole graph, and eager results from compiled code."""

import pytest
import torch
from hpc_common.poison import bits
from hpc_common.testing import device_params
from hpc_router_gemm import RouterWeight, linear, route, router_gemm
from hpc_router_gemm.support import SUPPORT

FP32 = "fp32 weight, terms 1 to 3"
DEVICES = device_params(SUPPORT, "router_gemm", FP32)
LINEAR_DEVICES = device_params(SUPPORT, "linear", FP32)
ROUTE_DEVICES = device_params(SUPPORT, "route", FP32)
pytestmark = pytest.mark.usefixtures("one_thread")
ops = torch.ops.hpc_router_gemm


def made(m: int, n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((m, k), generator=generator).to(torch.bfloat16)
    return x.to(device), torch.randn((n, k), generator=generator).to(device)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [0, 5])
def test_opcheck_router_gemm(m: int, device: str) -> None:
    x, weight = made(m, 20, 64, device)
    split = RouterWeight(weight).split
    torch.library.opcheck(ops.router_gemm, (x, weight, split, 2, False, True, torch.empty((m, 20), device=device)))


@pytest.mark.parametrize("device", LINEAR_DEVICES)
@pytest.mark.parametrize("m", [0, 5])
def test_opcheck_linear(m: int, device: str) -> None:
    x, weight = made(m, 20, 64, device)
    torch.library.opcheck(ops.linear, (x, weight, 3, torch.empty((m, 20), device=device)))


@pytest.mark.parametrize("device", ROUTE_DEVICES)
@pytest.mark.parametrize("biased", [False, True])
def test_opcheck_route(biased: bool, device: str) -> None:
    x, weight = made(5, 24, 64, device)
    split = RouterWeight(weight).split
    bias = torch.zeros(24, device=device) if biased else None
    ids, weights = torch.empty((5, 4), dtype=torch.int32, device=device), torch.empty((5, 4), device=device)
    torch.library.opcheck(ops.route, (x, weight, split, 2, 4, "sigmoid", bias, 4, 2, True, 1.0, False, ids, weights))


def test_schemas_mark_what_is_written() -> None:
    written = {
        name: [argument.name for argument in getattr(ops, name).default._schema.arguments if argument.is_write]
        for name in ("router_gemm", "linear", "route")
    }
    assert written == {"router_gemm": ["out"], "linear": ["out"], "route": ["ids", "weights"]}


class Router(torch.nn.Module):
    """What a model does with it: scores, a result in place, and a choice, with work around them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.router = RouterWeight(weight)
        self.plain = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x * 2
        scores = router_gemm(x, self.router)
        written = router_gemm(x, self.router, out=out)
        exact = linear(x, self.plain)
        ids, weights = route(x, self.router, 4, scoring="sigmoid", bias=self.bias, num_groups=4, topk_groups=2)
        return scores + 1, written + 0, exact, ids, weights * 2


@pytest.mark.parametrize("device", ROUTE_DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(dynamic: bool, device: str) -> None:
    x, weight = made(9, 24, 128, device)
    module = Router(weight, torch.linspace(0, 1, 24, device=device))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (9, 4, 1, 0):
        outs = torch.empty((2, m, 24), device=device)
        wanted, result = module(x[:m], outs[0]), compiled(x[:m], outs[1])
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(wanted, result, strict=True))
        assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_sees_updates_and_settles(device: str) -> None:
    x, weight = made(9, 24, 128, device)
    w = RouterWeight(weight)
    compiles = [0]

    def backend(graph, inputs):
        compiles[0] += 1
        return graph.forward

    compiled = torch.compile(lambda x: router_gemm(x, w), fullgraph=True, backend=backend)
    for step in range(5):
        new = weight + step
        w.update_(new)
        for _ in range(2):
            assert torch.equal(compiled(x), router_gemm(x, RouterWeight(new)))
        assert not w.updated
    assert compiles[0] == 2  # one graph for a call right behind an update, one for all others


@pytest.mark.parametrize("device", DEVICES)
def test_inductor(device: str) -> None:
    x, weight = made(9, 24, 128, device)
    w = RouterWeight(weight)
    router_gemm(x, w)
    compiled = torch.compile(lambda x: router_gemm(x, w), fullgraph=True)
    assert torch.equal(compiled(x), router_gemm(x, w))


def test_fake_tensors_have_the_right_shapes() -> None:
    with torch._subclasses.FakeTensorMode():
        x, w = torch.empty((7, 64), dtype=torch.bfloat16), RouterWeight(torch.empty((20, 64)))
        scores, (ids, weights) = router_gemm(x, w), route(x, w, 3)
        assert scores.shape == linear(x, w.weight).shape == (7, 20) and scores.dtype == torch.float32
        assert ids.shape == weights.shape == (7, 3) and ids.dtype == torch.int32 and weights.dtype == torch.float32


def test_bad_input_raises_under_compile_too() -> None:
    w = RouterWeight(torch.ones((4, 64)))
    compiled = torch.compile(lambda x: router_gemm(x, w), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="expected dtype torch.bfloat16, got torch.float16"):
        compiled(torch.ones((2, 64), dtype=torch.float16))
