"""SGLang's linear_bf16_fp32 through hpc_router_gemm, the methods rewritten to keep x in bf16, the switches."""

import hpc_router_gemm
import pytest
import torch
from hpc_common.reference import router as reference
from hpc_sglang import compat, counters, router
from hpc_sglang.record import ROUTER, Record
from hpc_sglang.router import RouterHooks, gates
from hpc_sglang.router.rewrite import keep_bf16

EXPERTS, HIDDEN, TOKENS = 24, 320, 12


@pytest.fixture(autouse=True)
def in_sglang(hooked: Record) -> None:
    """The hooks are in place."""


def weight_and_x() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(EXPERTS, HIDDEN, generator=generator) * 0.05
    return weight, torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)


def placed() -> RouterHooks:
    """The hooks that the plugin placed in this process."""
    linear = compat.find(*compat.LINEAR_BF16_FP32).linear_bf16_fp32
    return next(cell.cell_contents.__self__ for cell in linear.__closure__ if hasattr(cell.cell_contents, "__self__"))


class Expected:
    def one(self, x):
        return self.gate(x.to(dtype=torch.float32))

    def unrelated(self, x):
        return x.to(torch.float32)


class Overrides(Expected):
    def one(self, x):
        return x


class CastElsewhere(Expected):
    def two(self, x):
        return self.gate(x.to(torch.float32)), x.to(torch.float32)


class GateWithoutCast(Expected):
    def two(self, x):
        return self.gate(x.to(torch.float32)), self.gate(x)


class OtherOrder(Expected):
    def two(self, x):
        return x.to(torch.float32), self.gate(x)


def test_rewriting() -> None:
    """A method is rewritten only where its one fp32 is the cast in front of the gate, else nothing of the class is."""
    for kind in (Overrides, CastElsewhere, GateWithoutCast, OtherOrder):
        assert not keep_bf16(kind)
    assert set(keep_bf16(Expected)) == {"one"}

    class Known:
        gate = staticmethod(lambda x: x)

        def one(self, x, *, scale=2):
            return self.gate(x.to(torch.float32)), scale

    rewritten = keep_bf16(Known)["one"]
    x = weight_and_x()[1]
    assert rewritten(Known(), x) == (x, 2) and rewritten(Known(), x)[0] is x
    assert Known().one(x)[0].dtype == torch.float32


def test_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compat.find(*compat.LINEAR_BF16_FP32)
    weight, x = weight_and_x()
    counters.reset()
    three, two = (hpc_router_gemm.linear(x, weight, terms) for terms in (3, 2))
    assert not three.equal(two)
    assert module.linear_bf16_fp32(x, weight).equal(three)
    assert module.linear_bf16_fp32(x, weight, hpc_kernel_min_m=16).equal(two)
    monkeypatch.setattr(placed(), "two_terms", True)
    assert module.linear_bf16_fp32(x, weight).equal(two)
    assert counters.calls == {"router.linear": 3}
    wide = torch.stack([x, x], 2)[:, :, 0]
    assert module.linear_bf16_fp32(wide, weight).equal(two)
    monkeypatch.setattr(placed(), "terms", 1)
    assert module.linear_bf16_fp32(x, weight).equal(hpc_router_gemm.linear(x, weight, 1))
    counters.reset()
    exact = reference.scores(x, weight)
    for result in (
        module.linear_bf16_fp32(x.float(), weight),
        module.linear_bf16_fp32(x[:, :4], weight[:, :4]) + module.linear_bf16_fp32(x[:, 4:], weight[:, 4:]),
    ):
        assert (result.double() - exact).abs().max() < 1e-4
    monkeypatch.setattr(placed(), "deterministic", True)
    assert module.linear_bf16_fp32(x, weight).equal(torch.mm(x.float(), weight.t()))
    assert not counters.calls


def test_gates_compile() -> None:
    """Without a break in the graph, the rewritten method too; a traced call does not count."""
    from sglang.srt.models.hunyuan_v3 import HYV3MoEFused

    weight, x = weight_and_x()
    block = HYV3MoEFused.__new__(HYV3MoEFused)
    torch.nn.Module.__init__(block)
    block.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
    block.gate.weight.data.copy_(weight)
    gates.install(torch.nn.ModuleList([block]), None, False)
    method = keep_bf16(HYV3MoEFused)["_forward_single_stream"]
    assert block._forward_single_stream.__func__ is method
    counters.reset()
    compiled = torch.compile(lambda x: block.gate(x.to(torch.bfloat16))[0], fullgraph=True, backend="eager")
    assert compiled(x).equal(hpc_router_gemm.linear(x, weight)) and not counters.calls
    assert compiled(x[:5]).equal(hpc_router_gemm.linear(x[:5], weight))


def test_linear_that_stays_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compat.find(*compat.LINEAR_BF16_FP32)
    weight, x = weight_and_x()
    calls = []
    monkeypatch.setattr(module, "_linear_bf16_fp32_cublas", lambda x, y: calls.append(y.dtype))
    module.linear_bf16_fp32(x, weight.bfloat16())
    monkeypatch.setattr(placed(), "active", False)
    module.linear_bf16_fp32(x, weight)
    assert calls == [torch.bfloat16, torch.float32]


def test_modules_that_have_it_by_name_have_the_hooked_one() -> None:
    from sglang.srt.models import longcat_flash

    assert longcat_flash.linear_bf16_fp32 is compat.find(*compat.LINEAR_BF16_FP32).linear_bf16_fp32
    assert hasattr(longcat_flash.linear_bf16_fp32, "__wrapped__")


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = []
    monkeypatch.setattr(compat, "hook", lambda kind, target, function, failed: targets.append(target))
    monkeypatch.setattr(compat, "hook_methods", lambda *args: targets.append(args[1]))
    monkeypatch.setenv("HPC_SGLANG_ROUTER", "0")
    record = Record()
    router.register(record)
    assert record.reason(ROUTER) == "HPC_SGLANG_ROUTER=0 in the environment" and not targets
    monkeypatch.delenv("HPC_SGLANG_ROUTER")
    router.register(record)
    assert not record.reason(ROUTER) and len(targets) == 4
    for value, terms in (("", None), ("1", 1), ("3", 3)):
        monkeypatch.setenv("HPC_SGLANG_ROUTER_TERMS", value)
        assert router.terms_asked() == terms
    monkeypatch.setenv("HPC_SGLANG_ROUTER_TERMS", "4")
    with pytest.raises(ValueError, match="HPC_SGLANG_ROUTER_TERMS: expected 1, 2 or 3, got '4'"):
        router.register(record)
