"""The gates in SGLang's own classes: scores, dtypes, weight updates, what is left to SGLang, linear_bf16_fp32."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hpc_router_gemm
import pytest
import torch
from hpc_common.reference import router as reference
from hpc_common.testing import device_params
from hpc_router_gemm.support import SUPPORT
from hpc_sglang import compat, counters
from hpc_sglang.record import ROUTER, Record
from hpc_sglang.router import RouterHooks, gates
from torch import nn

EXPERTS, HIDDEN, TOKENS = 24, 320, 12


def fill(weight: torch.Tensor, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.05)


def batch(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)


def linear_gate(dtype: torch.dtype = torch.float32) -> nn.Module:
    from sglang.srt.layers.linear import ReplicatedLinear

    gate = ReplicatedLinear(HIDDEN, EXPERTS, bias=False, params_dtype=dtype)
    fill(gate.weight)
    return gate


class Scores(Exception):
    """Ends a block's forward where it chooses experts, with the scores it would choose by."""


def choose(hidden_states: torch.Tensor, router_logits: torch.Tensor, **_: Any) -> None:
    raise Scores(router_logits)


def scores_of(forward: Callable[..., Any], *args: Any) -> torch.Tensor:
    """The scores by which ``forward`` would choose experts."""
    with pytest.raises(Scores) as ended:
        forward(*args)
    return ended.value.args[0]


def bare(kind: type, **members: Any) -> nn.Module:
    """A module of SGLang's with these members and none of the others, which need a server."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in {"topk": choose, "layer_id": 0, **members}.items():
        setattr(module, name, value)
    return module


def longcat(known_shape: bool = False, **settings: Any) -> nn.Module:
    from sglang.srt.models.longcat_flash import LongcatFlashRouter

    config = SimpleNamespace(n_routed_experts=EXPERTS, hidden_size=HIDDEN, router_bias=settings.pop("bias", False))
    made = LongcatFlashRouter(config, **settings)
    made.hpc_kernel_min_m = 16 if known_shape else None
    fill(made.classifier.weight)
    return made


def glm4(**_: Any) -> nn.Module:
    from sglang.srt.models.glm4_moe import Glm4MoeGate

    gate = Glm4MoeGate(SimpleNamespace(n_routed_experts=EXPERTS, hidden_size=HIDDEN))
    fill(gate.weight)
    return gate


def hunyuan() -> nn.Module:
    from sglang.srt.models.hunyuan_v3 import HYV3MoEFused

    return bare(HYV3MoEFused, gate=linear_gate(), alt_stream=None, shared_mlp=None)


def minimax_m2() -> nn.Module:
    from sglang.srt.models.minimax_m2 import MiniMaxM2MoE

    return bare(MiniMaxM2MoE, gate=linear_gate())


def minimax_m3(bf16: bool = False) -> nn.Module:
    from sglang.srt.models.minimax_m3 import MiniMaxM3MoE

    return bare(MiniMaxM3MoE, gate=linear_gate(), bf16_router_gemm=bf16)


def step3p5(fp32: bool = True) -> nn.Module:
    from sglang.srt.models.step3p5 import Step3p5MoEMLP

    return bare(Step3p5MoEMLP, gate=linear_gate(torch.bfloat16), need_fp32_gate=fp32)


# What 0.5.17 passes on to the choice of experts.
BATCH = SimpleNamespace(num_token_non_padded=None)

# name -> (make, weight of it, forward of it that gives scores, terms of the weight)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable, Callable, int]] = {
    "longcat": (longcat, lambda m: m.classifier.weight, lambda m, x: m(x), 3),
    "longcat, SGLang's kernel": (lambda: longcat(True), lambda m: m.classifier.weight, lambda m, x: m(x), 2),
    "glm4": (glm4, lambda m: m.weight, lambda m, x: m(x), 3),
    "hunyuan": (hunyuan, lambda m: m.gate.weight, lambda m, x: scores_of(m, x), 3),
    "minimax m2": (minimax_m2, lambda m: m.gate.weight, lambda m, x: scores_of(m.forward_normal, x), 3),
    "minimax m2, DeepEP": (minimax_m2, lambda m: m.gate.weight, lambda m, x: scores_of(m.forward_deepep, x, BATCH), 3),
    "minimax m3": (minimax_m3, lambda m: m.gate.weight, lambda m, x: m._compute_router_logits(x), 3),
    "step3.5": (step3p5, lambda m: m.gate.weight, lambda m, x: scores_of(m.forward_normal, x), 1),
    "step3.5, DeepEP": (step3p5, lambda m: m.gate.weight, lambda m, x: scores_of(m.forward_deepep, x, BATCH), 1),
}


def model_of(*blocks: nn.Module) -> nn.Module:
    """A model with these blocks, and updates as SGLang makes them: named tensors copied into the parameters."""
    model = nn.Module()
    model.blocks = nn.ModuleList(blocks)

    def load_weights(named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            model.get_parameter(name).data.copy_(tensor)

    model.load_weights = load_weights
    return model


@pytest.fixture(autouse=True)
def in_sglang(hooked: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are in place; where experts lie is nowhere."""
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo

    monkeypatch.setattr(ExpertLocationDispatchInfo, "init_new", staticmethod(lambda **_: None))


DEVICES = device_params(SUPPORT, "router_gemm", "fp32 weight, terms 1 to 3", "bf16 weight")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_scores(name: str, device: str) -> None:
    make, weight_of, forward, terms = MODELS[name]
    block = make().to(device)
    model, x, weight = model_of(block), batch().to(device), weight_of(block).detach()
    before = forward(block, x)
    found = gates.install(model, None, False)
    assert found.gates.total() == 1 and found.terms == {terms} and not found.left
    counters.reset()
    after = forward(block, x)
    assert counters.calls == {"router.gemm": 1}
    assert after.dtype == torch.float32 and after.shape == (TOKENS, EXPERTS)
    exact = reference.scores(x, weight)
    rms, largest = reference.pool(after.double().cpu() - exact, x, weight, 2)
    assert rms <= 1 and largest <= 1
    # SGLang's own scores are as good (it does the same in fp32), but other arithmetic. 0.5.17 has bf16 in one place.
    assert before.dtype == torch.bfloat16 or (before.double().cpu() - exact).abs().max() < 1e-4
    want = hpc_router_gemm.router_gemm(x, hpc_router_gemm.RouterWeight(weight, terms))
    assert after.equal(want)


@pytest.mark.parametrize("name", ["longcat", "glm4", "hunyuan", "step3.5"])
def test_any_number_of_tokens_and_strided_rows(name: str) -> None:
    make, _, forward, _ = MODELS[name]
    block = make()
    gates.install(model_of(block), None, False)
    assert forward(block, batch(0)).shape == (0, EXPERTS)
    x = batch(33)
    want = forward(block, x)
    assert forward(block, x[5:6]).equal(want[5:6])
    columns = torch.stack([x, x], 2)[:, :, 0]  # neither dense nor aligned
    if name not in ("hunyuan", "step3.5"):  # whose code flattens first
        assert forward(block, columns).equal(want)


def test_three_terms_are_needed() -> None:
    """A weight one ulp away decides with three terms and is lost with two: what the default of three is for."""
    block = glm4()
    block.weight.data.zero_()
    block.weight.data[0, 0], block.weight.data[1, 0] = 1 + 2.0**-9, 1 + 2.0**-9 + 2.0**-23
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    gates.install(model_of(block), None, False)
    assert block(x)[0, 1] > block(x)[0, 0]
    other = glm4()
    other.weight.data.copy_(block.weight.data)
    gates.install(model_of(other), 2, False)
    assert block.hpc_gate.weight.terms == 3 and other.hpc_gate.weight.terms == 2
    assert other(x)[0, 1] == other(x)[0, 0]


@pytest.mark.parametrize("name", ["longcat", "glm4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_activations_go_to_sglang(name: str, dtype: torch.dtype) -> None:
    make, _, forward, _ = MODELS[name]
    block = make()
    x = batch().to(dtype)
    want = forward(block, x)
    gates.install(model_of(block), None, False)
    counters.reset()
    assert forward(block, x).equal(want) and not counters.calls


def test_a_model_in_another_dtype_is_left_alone() -> None:
    """A block whose cast in front of the gate is gone must not get fp16: it would be cut to bf16."""
    record, block = Record(), hunyuan()
    runner = SimpleNamespace(model=model_of(block), model_config=SimpleNamespace(dtype=torch.float16))
    RouterHooks(record, None).loaded(None, runner)
    assert "float16" in record.reason(ROUTER) and not hasattr(block, "hpc_gate")
    runner.model_config.dtype = torch.bfloat16
    record = Record()
    RouterHooks(record, None).loaded(None, runner)
    assert record.entries[ROUTER].detail == (
        "hpc_router_gemm.router_gemm for the gates (1 of HYV3MoEFused), 3 bf16 terms"
    )


def test_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = hpc_router_gemm.router_gemm
    monkeypatch.setattr(
        hpc_router_gemm, "router_gemm", lambda *args, **kwargs: seen.append(kwargs) or real(*args, **kwargs)
    )
    for invariant in (False, True):
        monkeypatch.setattr(compat, "deterministic", lambda invariant=invariant: invariant)
        block = hunyuan()
        runner = SimpleNamespace(model=model_of(block), model_config=SimpleNamespace(dtype=torch.bfloat16))
        hooks = RouterHooks(Record(), None)
        hooks.loaded(None, runner)
        scores_of(block, batch())
        assert seen.pop() == {"batch_invariant": invariant} and hooks.deterministic is invariant
        assert not hooks.two_terms
    monkeypatch.setattr(compat.find(*compat.LINEAR_BF16_FP32), "_linear_bf16_fp32_algo", "hpc")
    hooks.loaded(None, runner)
    assert hooks.two_terms  # the user asked SGLang for its kernel of two terms


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """update(model, named tensors): SGLang's own WeightUpdater, as for weights that another process sends."""
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    monkeypatch.setattr(WeightUpdater, "_assert_weight_cache_inactive", lambda *args: None)
    monkeypatch.setattr(weight_updater, "monkey_patch_torch_reductions", lambda: None)
    monkeypatch.setattr(weight_updater, "get_parallel", lambda: SimpleNamespace(tp_rank=0), raising=False)

    def run(model: nn.Module, named: list[tuple[str, torch.Tensor]]) -> Any:
        fields = {field.name: None for field in dataclasses.fields(WeightUpdater) if field.init}
        fields |= {"get_model": lambda: model, "device": "cpu", "custom_weight_loaders": {}, "tp_rank": 0}
        return WeightUpdater(**fields).update_weights_from_tensor(named)

    return run


def test_a_weight_update_reaches_the_gates(update: Callable[..., Any]) -> None:
    blocks = [hunyuan(), longcat()]
    model, x = model_of(*blocks), batch()
    gates.install(model, None, False)
    before, address = scores_of(blocks[0], x), blocks[0].hpc_gate.weight.weight.data_ptr()
    new = [fill(torch.empty(EXPERTS, HIDDEN), seed) for seed in (2, 3)]
    named = [("blocks.0.gate.weight", new[0]), ("blocks.1.classifier.weight", new[1])]
    assert update(model, named)[0]
    want = [hpc_router_gemm.router_gemm(x, hpc_router_gemm.RouterWeight(weight, 3)) for weight in new]
    assert scores_of(blocks[0], x).equal(want[0]) and blocks[1](x).equal(want[1])
    assert not scores_of(blocks[0], x).equal(before)
    assert blocks[0].hpc_gate.weight.weight.data_ptr() == address  # captured graphs read there

    def fails(named: Any) -> None:
        blocks[1].classifier.weight.data.zero_()
        raise RuntimeError("no such parameter")

    model.load_weights = fails
    with pytest.raises(RuntimeError, match="no such parameter"):
        update(model, named)
    assert not blocks[1](x).any()  # as SGLang's own layers, which have the half of it


def placed() -> RouterHooks:
    """The hooks that the plugin placed in this process."""
    linear = compat.find(*compat.LINEAR_BF16_FP32).linear_bf16_fp32
    return next(cell.cell_contents.__self__ for cell in linear.__closure__ if hasattr(cell.cell_contents, "__self__"))


@pytest.mark.gpu
def test_a_captured_gate_sees_updates(update: Callable[..., Any]) -> None:
    block, x = glm4().to("cuda"), batch().to("cuda")
    model = model_of(block)
    gates.install(model, None, False)
    block(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block(x)
    new = fill(torch.empty(EXPERTS, HIDDEN), 4).to("cuda")
    update(model, [("blocks.0.weight", new)])
    graph.replay()
    assert out.equal(hpc_router_gemm.router_gemm(x, hpc_router_gemm.RouterWeight(new, 3)))


def test_updates_are_not_refused(update: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang refuses updates once its kernel of two terms may keep a split weight; with ours nothing keeps one."""
    monkeypatch.setattr(compat.find(*compat.LINEAR_BF16_FP32), "_hpc_gemm_enabled", True)
    assert update(model_of(longcat()), [])[0]
    monkeypatch.setattr(placed(), "active", False)
    done, message = update(model_of(longcat()), [])
    assert not done and "Online weight updates are not supported" in message


def test_weights_that_arrive_after_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    block = glm4()
    runner = SimpleNamespace(model=model_of(block), model_config=SimpleNamespace(dtype=torch.bfloat16))
    hooks = RouterHooks(Record(), None)
    hooks.loaded(None, runner)
    fill(block.weight, 5)
    hooks.loaded(None, runner)
    assert block(batch()).equal(
        hpc_router_gemm.router_gemm(batch(), hpc_router_gemm.RouterWeight(block.weight.data, 3))
    )
    assert hooks.record.entries[ROUTER].detail.startswith(
        "hpc_router_gemm.router_gemm for the gates (1 of Glm4MoeGate)"
    )


def test_a_failure_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "install", lambda *args: 1 / 0)
    record = Record()
    runner = SimpleNamespace(model=None, model_config=SimpleNamespace(dtype=torch.bfloat16))
    RouterHooks(record, None).loaded(None, runner)
    assert record.reason(ROUTER) == "taking the gates over failed: division by zero"


def test_a_model_without_such_gates() -> None:
    record = Record()
    runner = SimpleNamespace(model=model_of(linear_gate()), model_config=SimpleNamespace(dtype=torch.bfloat16))
    RouterHooks(record, None).loaded(None, runner)
    assert record.reason(ROUTER) == "this model has no gate that is known here"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: longcat(bias=True), "LongcatFlashRouter's gate stays SGLang's: it has a bias"),
        (lambda: longcat(rounter_params_dtype=torch.bfloat16), ""),
        (lambda: minimax_m3(bf16=True), ""),
        (lambda: step3p5(fp32=False), ""),
    ],
)
def test_left_to_sglang(make: Callable[[], nn.Module], reason: str) -> None:
    block = make()
    found = gates.install(model_of(block), None, False)
    assert not found.gates and found.left == ({reason} if reason else set()) and not hasattr(block, "hpc_gate")


def test_code_that_is_not_known_is_left_alone() -> None:
    from sglang.srt.models.hunyuan_v3 import HYV3MoEFused

    class Other(HYV3MoEFused):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate(x.to(torch.float32))[0].to(torch.float32)

    block = bare(Other, gate=linear_gate(), alt_stream=None, shared_mlp=None)
    found = gates.install(model_of(block), None, False)
    assert found.left == {"HYV3MoEFused's gate stays SGLang's: its code is not the one known here"}
    assert block(batch()).dtype == torch.float32


def test_updates_that_cannot_be_followed_turn_it_off() -> None:
    """Where a newer SGLang has none of the known methods, gates must not be taken over: they could grow old."""
    record = Record()
    hooks = RouterHooks(record, None)
    compat.hook_methods("around", compat.WEIGHT_UPDATER, "WeightUpdater", ("no_such",), hooks.updated, hooks.failed)
    compat.find(compat.WEIGHT_UPDATER)
    assert "WeightUpdater with no_such" in record.reason(ROUTER)
    block = glm4()
    hooks.loaded(None, SimpleNamespace(model=model_of(block), model_config=SimpleNamespace(dtype=torch.bfloat16)))
    assert not hasattr(block, "hpc_gate")
