"""The MoE runner hpc_ops in SGLang's own classes: values by float64, ranks, updates, refusals, SGLang's function."""

import inspect
import math
from types import SimpleNamespace
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_common.metrics import error
from hpc_common.reference import moe as reference
from hpc_common.testing import device_params
from hpc_moe.support import SUPPORT
from hpc_sglang import compat, counters
from hpc_sglang.moe import MoeHooks
from hpc_sglang.moe.experts import Experts, Workspaces
from hpc_sglang.record import MOE, Record

EXPERTS, HIDDEN, INNER, TOP_K = 6, 640, 256, 3
FACTOR = 2.5


def weights(quant: str) -> dict[str, torch.Tensor]:
    """A layer's tensors by SGLang's names. Scales differ by at least 4 between neighbouring blocks and experts."""
    generator = torch.Generator().manual_seed(3)

    def fp8(*shape: int) -> torch.Tensor:
        # Clamped here: older versions of torch make NaN of what is beyond e4m3.
        return (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        steps = torch.arange(math.prod(shape)).reshape(shape)
        return 4.0 ** ((steps * 2 + steps // shape[-1]) % 3) * 2**-17

    made = {"w13_weight": fp8(EXPERTS, 2 * INNER, HIDDEN), "w2_weight": fp8(EXPERTS, HIDDEN, INNER)}
    if quant == "block":
        made["w13_weight_scale_inv"] = scales(EXPERTS, 2 * INNER // 128, HIDDEN // 128)
        made["w2_weight_scale_inv"] = scales(EXPERTS, HIDDEN // 128, INNER // 128)
    else:
        made["w13_weight_scale"], made["w2_weight_scale"] = scales(EXPERTS), scales(EXPERTS) * 8
        made["w13_input_scale"], made["w2_input_scale"] = torch.tensor(0.011), torch.tensor(0.019)
    return {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in made.items()}


class Layer(torch.nn.Module):
    """What the hooks see of SGLang's FusedMoE, with one rank's part of ``weights``."""

    def __init__(self, quant: str, ep: tuple[int, int] = (0, 1), tp: tuple[int, int] = (0, 1), **config: Any) -> None:
        from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

        super().__init__()
        local = slice(ep[0] * EXPERTS // ep[1], (ep[0] + 1) * EXPERTS // ep[1])
        part = INNER // tp[1]
        for name, tensor in weights(quant).items():
            if tensor.dim():
                tensor = tensor[local]
            if tensor.dim() == 3:
                unit = 128 if name.endswith("inv") else 1
                rows = slice(tp[0] * part // unit, (tp[0] + 1) * part // unit)
                if name.startswith("w2"):
                    tensor = tensor[:, :, rows]
                else:
                    tensor = torch.cat([half[:, rows] for half in tensor.chunk(2, 1)], 1)
            setattr(self, name, torch.nn.Parameter(tensor.contiguous(), requires_grad=False))
        self.moe_ep_rank, self.moe_ep_size = ep
        self.num_experts = EXPERTS
        self.moe_runner_config = MoeRunnerConfig(
            **{
                "num_experts": EXPERTS,
                "num_local_experts": EXPERTS // ep[1],
                "hidden_size": HIDDEN,
                "intermediate_size_per_partition": part,
                "top_k": TOP_K,
                "num_fused_shared_experts": 0,
                "params_dtype": torch.bfloat16,
                "routed_scaling_factor": FACTOR,
                **config,
            }
        )
        self.method = SimpleNamespace(
            block_quant=quant == "block", quant_config=SimpleNamespace(weight_block_size=[128, 128])
        )

    def prepare(self) -> "Layer":
        """What SGLang does once the weights are loaded."""
        from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod

        Fp8MoEMethod._prepare_hpc_ops_weights(self.method, self)
        return self

    def forward(self, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """A call as Fp8MoEMethod.apply makes it, of the function that SGLang's runner would take."""
        from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
        from sglang.srt.layers.moe.topk import StandardTopKOutput
        from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod

        run = FusedOpPool.get_fused_func("none", "hpc_ops")
        info = Fp8MoEMethod._get_hpc_ops_quant_info(self.method, self)
        topk = StandardTopKOutput(topk_weights, ids, None)
        return run(dispatched(x, topk), info, self.moe_runner_config).hidden_states


def dispatched(x: torch.Tensor, topk: Any) -> Any:
    """What SGLang's dispatcher hands to a runner."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput

    return StandardDispatchOutput(x, None, topk)


def tokens(number: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, ids, weights) of a batch; one slot is -1, with NaN for its weight."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(number, HIDDEN, generator=generator).to(torch.bfloat16)
    topk_weights, ids = torch.rand(number, EXPERTS, generator=generator).topk(TOP_K)
    ids[-1, -1], topk_weights[-1, -1] = -1, torch.nan
    return x, ids.to(torch.int32), topk_weights


def expected(quant: str, batch: tuple[torch.Tensor, ...], made: dict[str, torch.Tensor], **options: Any) -> Any:
    """The whole layer in float64, from SGLang's tensors."""
    suffix = "_inv" if quant == "block" else ""
    scales = [made[f"{name}_weight_scale{suffix}"] for name in ("w13", "w2")]
    if quant == "tensor":
        options = {"x_scale": made["w13_input_scale"][None], "act_scale": made["w2_input_scale"][None], **options}
    x, ids, topk_weights = batch
    options = {"routed_scaling_factor": FACTOR, **options}
    return reference.fused_moe(x, made["w13_weight"], made["w2_weight"], ids, topk_weights, quant, *scales, **options)


def check(result: torch.Tensor, want: torch.Tensor, limit: float = 0.006) -> None:
    """Relative RMS within hpc_moe's promise (sums over ranks add their own roundings to bf16)."""
    assert error(result, want).relative_rms <= limit


@pytest.fixture(autouse=True)
def alone(hooked: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are in place, and SGLang's own kernels are not installed."""
    monkeypatch.setattr(compat, "upstream_hpc", lambda: False)


DEVICES = device_params(SUPPORT, "fused_moe", "block FP8, bf16 x", "per-tensor FP8, bf16 x")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quant", ["block", "tensor"])
def test_values(quant: str, device: str, hooked: Record) -> None:
    layer = Layer(quant).to(device).prepare()
    batch = tuple(tensor.to(device) for tensor in tokens())
    counters.reset()
    check(layer(*batch), expected(quant, batch, weights(quant)))
    assert counters.calls == {f"moe.{quant}": 1}
    assert not hooked.reason(MOE) and "experts (6 of 256 x 640 on this rank)" in hooked.entries[MOE].detail
    empty = layer(*(tensor[:0] for tensor in batch))
    assert empty.shape == (0, HIDDEN) and empty.dtype == torch.bfloat16


def test_in_sglangs_runner(hooked: Record) -> None:
    """MoeRunner takes it, without SGLang's own check for a GPU, from the version on that lets a runner have a core."""
    from sglang.srt.layers.moe.moe_runner import MoeRunner, runner
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    if not hasattr(runner, "register_moe_runner_core"):
        pytest.skip("this SGLang has no registry of runner cores")
    layer, (x, ids, topk_weights) = Layer("block").prepare(), tokens()
    made = MoeRunner(MoeRunnerBackend("hpc_ops"), layer.moe_runner_config)
    topk = SimpleNamespace(topk_ids=ids, topk_weights=topk_weights)
    want = layer(x, ids, topk_weights)
    assert made.run(dispatched(x, topk), layer.hpc_experts).hidden_states.equal(want)
    made.fused_func = None  # as under SGLANG_CI_DISABLE_MOE_FUSED_FUNC=1: the core itself
    assert made.run(dispatched(x, topk), layer.hpc_experts).hidden_states.equal(want)


def test_another_dtype_of_ids_and_weights() -> None:
    layer, (x, ids, topk_weights) = Layer("block").prepare(), tokens()
    want = layer(x, ids, topk_weights)
    assert layer(x, ids.long(), topk_weights).equal(want)
    halved = topk_weights.bfloat16()
    assert layer(x, ids.short(), halved).equal(layer(x, ids, halved.float()))


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["block", "tensor"])
def test_a_captured_layer(quant: str) -> None:
    """A CUDA graph of the layer's call follows its inputs, and updates of weights in place."""
    layer = Layer(quant).to("cuda").prepare()
    batch = [tensor.to("cuda") for tensor in tokens()]
    layer(*batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*batch)
    changed = weights(quant)
    name = "w2_weight_scale_inv" if quant == "block" else "w2_weight_scale"
    changed[name] = torch.nn.Parameter(changed[name].flip(0), requires_grad=False)
    getattr(layer, name).copy_(changed[name])
    other = [tensor.roll(3, 0) for tensor in batch]
    for captured, new in zip(batch, other, strict=True):
        captured.copy_(new)
    graph.replay()
    check(out, expected(quant, tuple(other), changed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quant", ["block", "tensor"])
@pytest.mark.parametrize("split", ["ep", "tp"])
def test_ranks(quant: str, split: str, device: str) -> None:
    """Two ranks' parts add up to the layer; neither is the layer by itself. Ids are global on every rank."""
    batch = tuple(tensor.to(device) for tensor in tokens())
    parts = [Layer(quant, **{split: (rank, 2)}).to(device).prepare()(*batch).double().cpu() for rank in range(2)]
    want = expected(quant, batch, weights(quant))
    check(parts[0] + parts[1], want, 0.008)
    assert min(error(part, want).relative_rms for part in parts) > 0.3


@pytest.mark.parametrize("options", [{"routed_scaling_factor": None}, {"swiglu_limit": 0.25}])
def test_options(options: dict[str, Any]) -> None:
    batch = tokens()
    want = {key: 1.0 if key == "routed_scaling_factor" else value for key, value in options.items()}
    result = Layer("block", **options).prepare()(*batch)
    check(result, expected("block", batch, weights("block"), **want))
    assert error(result, expected("block", batch, weights("block"))).relative_rms > 0.1


def test_shared_experts_fused_into_the_routed_ones() -> None:
    layer, batch = Layer("block", num_fused_shared_experts=1).prepare(), tokens()
    check(layer(*batch), expected("block", batch, weights("block")))


@pytest.mark.parametrize("rebind", [False, True])
def test_weights_are_read_at_each_call(rebind: bool) -> None:
    """After an update, in place or to new tensors, the layer runs with the new scales."""
    layer, batch = Layer("block").prepare(), tokens()
    layer(*batch)
    changed = weights("block")
    changed["w13_weight_scale_inv"] = torch.nn.Parameter(changed["w13_weight_scale_inv"].flip(0), requires_grad=False)
    if rebind:
        layer.w13_weight_scale_inv = changed["w13_weight_scale_inv"]
    else:
        layer.w13_weight_scale_inv.copy_(changed["w13_weight_scale_inv"])
    check(layer(*batch), expected("block", batch, changed))


def test_deterministic_inference_is_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = hpc_moe.fused_moe
    monkeypatch.setattr(hpc_moe, "fused_moe", lambda *args, **kwargs: seen.append(kwargs) or real(*args, **kwargs))
    for asked in (False, True):
        monkeypatch.setattr(compat, "deterministic", lambda asked=asked: asked)
        layer = Layer("block").prepare()
        seen.clear()
        layer(*tokens())
        assert [call["batch_invariant"] for call in seen] == [asked]


REFUSED = [
    ("block", {"activation": "gelu"}, "activation: expected silu, got gelu"),
    ("block", {"is_gated": False}, "is_gated"),
    ("block", {"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
    ("block", {"no_combine": True}, "no_combine"),
    ("block", {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0}, "gemm1_alpha: expected None, got 1.7"),
    ("block", {"gemm1_clamp_limit": 7.0}, "gemm1_clamp_limit"),
    ("tensor", {"params_dtype": torch.float16}, "activations: expected torch.bfloat16, got torch.float16"),
    ("block", {"top_k": 33}, "k from 1 to 32"),
    ("block", {"swiglu_limit": -1.0}, "swiglu_limit"),
]


@pytest.mark.parametrize(("quant", "config", "reason"), REFUSED)
def test_refused_when_the_weights_are_loaded(quant: str, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match="--moe-runner-backend hpc_ops: .*another --moe-runner-backend") as refusal:
        Layer(quant, **config).prepare()
    assert reason in str(refusal.value)


def test_refused_weights() -> None:
    def refusal(layer: Layer) -> str:
        with pytest.raises(ValueError, match="--moe-runner-backend hpc_ops: ") as raised:
            layer.prepare()
        return str(raised.value)

    layer = Layer("block")
    layer.method.quant_config.weight_block_size = [64, 128]
    assert "weight_block_size: expected [128, 128], got [64, 128]" in refusal(layer)
    layer = Layer("block")
    layer.w2_weight_bias = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN))
    assert "w2_weight_bias" in refusal(layer)
    layer = Layer("tensor")
    layer.w2_input_scale = None
    assert "static activation scales" in refusal(layer)
    layer = Layer("block", ep=(1, 2), num_fused_shared_experts=1)
    assert "expert parallelism" in refusal(layer)
    layer = Layer("block")
    layer.w13_weight = torch.nn.Parameter(layer.w13_weight.to(torch.float8_e5m2), requires_grad=False)
    assert "w13: expected" in refusal(layer)


def test_layers_left_to_sglang(hooked: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package that SGLang's own function calls, that function gets what hpc_moe does not do, said once."""
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
    from sglang.srt.layers.moe.moe_runner.hpc_ops import HpcOpsMoeQuantInfo, fused_experts_none_to_hpc_ops
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod

    monkeypatch.setattr(compat, "upstream_hpc", lambda: True)
    notes = []
    monkeypatch.setattr(hooked, "note", notes.append)
    layer = Layer("block", gemm1_clamp_limit=7.0).prepare()
    reason = "gemm1_clamp_limit: expected None, got 7.0"
    assert notes == [f"moe: SGLang's own hpc_ops function runs some layers: {reason}"]
    assert layer.hpc_ops_w13_weight_scale.shape == (EXPERTS, 4, 8)  # SGLang's own preparation pads 5 to 8
    run = FusedOpPool.get_fused_func("none", "hpc_ops")
    assert run.__self__.upstream is fused_experts_none_to_hpc_ops
    calls: list[Any] = []
    monkeypatch.setattr(run.__self__, "upstream", lambda *args: calls.append(args))
    names = inspect.signature(HpcOpsMoeQuantInfo).parameters
    run("dispatched", HpcOpsMoeQuantInfo(**dict.fromkeys(names)), "config")
    assert calls[0][0] == "dispatched"
    mixed = Layer("block").prepare()
    check(mixed(*tokens()), expected("block", tokens(), weights("block")))
    mixed.moe_runner_config.gemm1_clamp_limit = 7.0
    assert isinstance(Fp8MoEMethod._get_hpc_ops_quant_info(mixed.method, mixed.prepare()), HpcOpsMoeQuantInfo)


def test_weights_that_are_only_prepared() -> None:
    layer = Layer("block")
    del layer.moe_runner_config
    assert layer.prepare().hpc_ops_w2_weight_scale.shape == (EXPERTS, 5, 4) and not hasattr(layer, "hpc_experts")


def test_other_runners_are_untouched() -> None:
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
    from sglang.srt.layers.moe.moe_runner.triton import fused_experts_none_to_triton

    assert FusedOpPool.get_fused_func("none", "triton") is fused_experts_none_to_triton
    assert FusedOpPool.get_fused_func("deepep", "hpc_ops") is None


def test_refused_runners(hooked: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.moe.moe_runner import MoeRunner
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    config, name = Layer("block").moe_runner_config, MoeRunnerBackend("hpc_ops")
    with pytest.raises(ValueError, match="hpc_ops: LoRA on experts"):
        MoeRunner(name, config, lora_enabled=True)
    monkeypatch.setattr(compat, "runs_experts_by_all_to_all", lambda: "deepep")
    with pytest.raises(ValueError, match="hpc_ops: experts behind --moe-a2a-backend deepep"):
        MoeRunner(name, config)
    monkeypatch.undo()
    monkeypatch.setattr(compat, "upstream_hpc", lambda: False)
    hooked.not_used(MOE, "no GPU here")
    with pytest.raises(ValueError, match="hpc_ops: no GPU here"):
        MoeRunner(name, config)
    with pytest.raises(ValueError, match="hpc_ops: no GPU here"):
        Layer("block").prepare()


def test_workspace() -> None:
    """One buffer for all layers and sizes; it grows by powers of two, and what a graph may hold stays."""
    spaces = Workspaces()
    layers = [Layer(quant) for quant in ("block", "tensor")]
    experts = [Experts(layer, layer.method, False) for layer in layers]
    spaces.reserve(experts[0], 100)
    (buffer,) = spaces.buffers[torch.device("cpu")]
    for number in (0, 1, 100, 128):
        for one in experts:
            assert spaces.get(one, number, TOP_K, torch.device("cpu")) is buffer
    large = spaces.get(experts[0], 129, TOP_K, torch.device("cpu"))
    assert large.numel() > buffer.numel() and spaces.buffers[torch.device("cpu")] == [buffer, large]
    assert spaces.get(experts[0], 256, TOP_K, torch.device("cpu")) is large
    assert spaces.get(experts[1], 1, TOP_K, torch.device("cpu")) is large
    with pytest.raises(ValueError, match="workspace: expected at least"):  # the buffer is what the call gets
        batch = tokens()
        experts[0].run(batch[0], SimpleNamespace(topk_ids=batch[1], topk_weights=batch[2]), Small())


class Small:
    """Too little memory."""

    def get(self, *args: Any) -> torch.Tensor:
        return torch.empty(1024, dtype=torch.uint8)


def test_what_is_missing_in_sglang_is_a_reason() -> None:
    record = Record()
    compat.hook("around", "sglang.srt.layers.moe.moe_runner.base:FusedOpPool.no_such", None, MoeHooks(record).failed)
    assert "has no sglang.srt.layers.moe.moe_runner.base:FusedOpPool.no_such" in record.reason(MOE)


def test_a_runner_that_another_package_took() -> None:
    from sglang.srt.layers.moe.moe_runner import runner

    if not hasattr(runner, "register_moe_runner_core"):
        pytest.skip("this SGLang has no registry of runner cores")
    record = Record()
    hooks = MoeHooks(record)
    compat.register_runner_core("hpc_ops", hooks.run, hooks.failed)  # for the second time in this process
    assert "'hpc_ops' is already registered" in record.reason(MOE)
