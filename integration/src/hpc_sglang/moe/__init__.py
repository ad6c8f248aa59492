"""Fused MoE under the runner name ``hpc_ops`` that SGLang has built in.

A new runner name would leave Fp8MoEMethod without a runner, so the built-in one is used and its function replaced: the
layers that hpc_moe does carry an ``Experts`` from loading on, and the function looks for it. All other layers run as
without this package, by the function of SGLang's own, where the package that it calls is installed; else the server
stops at start with the reason.
"""

from typing import Any

from .. import compat
from ..record import MOE, Record
from .experts import Experts, Workspaces

FLAG = "--moe-runner-backend hpc_ops"
RUNNER = "hpc_ops"
_FP8 = "sglang.srt.layers.quantization.fp8:Fp8MoEMethod"
_QUANTISE = "sglang.srt.layers.quantization.fp8_utils:per_token_group_quant_fp8"


def register(record: Record) -> None:
    """Hook SGLang's MoE runner ``hpc_ops``; ``record`` says whether it is used, and why not."""
    import hpc_moe

    reason = hpc_moe.why_not("block")
    if reason:
        record.not_used(MOE, reason)
        return
    record.used(MOE, f"registered; runs FP8 experts under {FLAG}")
    hooks = MoeHooks(record)
    for target, function in (
        ("sglang.srt.layers.moe.moe_runner.base:FusedOpPool.get_fused_func", hooks.get_fused_func),
        ("sglang.srt.layers.moe.moe_runner.runner:MoeRunner.__init__", hooks.make_runner),
        (f"{_FP8}._prepare_hpc_ops_weights", hooks.prepare),
        (f"{_FP8}._get_hpc_ops_quant_info", hooks.quant_info),
    ):
        compat.hook("around", target, function, hooks.failed)
    compat.register_runner_core(RUNNER, hooks.run, hooks.failed)
    compat.hook("around", _QUANTISE, hooks.quantise, hooks.linear_failed)
    compat.hook_methods("after", compat.MODEL_RUNNER, "ModelRunner", compat.MODEL_LOADS, hooks.loaded, record.note)


class MoeHooks:
    """The hooks, and what they share. Each takes the hooked function first, then its arguments."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.workspaces = Workspaces()
        self.upstream: Any = None
        self.combine: Any = None
        self.layers = 0
        self.norms = (0, 0)
        self.linear = True

    def failed(self, reason: str) -> None:
        """A hook could not be placed. SGLang's own code then runs as it is."""
        self.record.not_used(MOE, reason)

    def get_fused_func(self, original: Any, pool: Any, dispatch_name: str, runner_name: str) -> Any:
        """FusedOpPool.get_fused_func: for the runner hpc_ops without an all-to-all, ``run``."""
        found = original(pool, dispatch_name, runner_name)
        if (dispatch_name, runner_name) != ("none", RUNNER):
            return found
        if found is None:  # where the runner has a core of ours, SGLang does not import the module that registers it
            compat.find("sglang.srt.layers.moe.moe_runner.hpc_ops")
            found = original(pool, dispatch_name, runner_name)
        self.upstream = found
        self.combine = compat.find("sglang.srt.layers.moe.token_dispatcher.standard:StandardCombineInput")
        return self.run

    def run(self, dispatch_output: Any, quant_info: Any, runner_config: Any) -> Any:
        """One layer's experts: ours where the layer carries an Experts, else SGLang's own function."""
        if isinstance(quant_info, Experts):
            out = quant_info.run(dispatch_output.hidden_states, dispatch_output.topk_output, self.workspaces)
            return self.combine(out)
        return self.upstream(dispatch_output, quant_info, runner_config)

    def make_runner(
        self, original: Any, runner: Any, runner_backend: Any, config: Any, lora_enabled: bool = False
    ) -> None:
        """MoeRunner.__init__: refuses what no function of this runner does, while the server starts."""
        if runner_backend.value == RUNNER:
            exchange = compat.runs_experts_by_all_to_all()
            if exchange:
                raise ValueError(f"{FLAG}: experts behind --moe-a2a-backend {exchange} are not supported")
            if lora_enabled:
                raise ValueError(f"{FLAG}: LoRA on experts (--enable-lora) is not supported")
            if self.record.reason(MOE) and not compat.upstream_hpc():
                raise ValueError(f"{FLAG}: {self.record.reason(MOE)}")
        original(runner, runner_backend, config, lora_enabled)

    def prepare(self, original: Any, method: Any, layer: Any) -> Any:
        """Fp8MoEMethod._prepare_hpc_ops_weights, when a layer's weights are loaded: decides who runs the layer."""
        if not hasattr(layer, "moe_runner_config"):  # weights that this method only prepares; another one runs them
            return original(method, layer)
        experts = Experts(layer, method, compat.deterministic())
        reason = self.record.reason(MOE) or experts.why_not()
        if not reason:
            layer.hpc_experts = experts
            self.workspaces.reserve(experts, compat.prefill_tokens())
            self.layers += 1
            self._say(experts)
            return None
        layer.hpc_experts = None
        if not compat.upstream_hpc():
            raise ValueError(f"{FLAG}: {reason}. Serve this model with another --moe-runner-backend")
        self.record.note(f"moe: SGLang's own hpc_ops function runs some layers: {reason}")
        return original(method, layer)

    def linear_failed(self, reason: str) -> None:
        """Projections quantise their input as before."""
        self.linear = False

    def quantise(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """per_token_group_quant_fp8, as block FP8 projections call it."""
        from . import norm

        return norm.quantise(original, *args, **kwargs)

    def loaded(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        """After ModelRunner has loaded a model: the norms in front of our experts, where they are known."""
        from . import norm

        try:
            self.norms = norm.install(runner.model, self.linear)
        except AttributeError as error:  # another SGLang's module: it works as it is
            self.record.note(f"moe: norms stay SGLang's: {error}")
        if any(self.norms):
            self._say(next(m.hpc_experts for m in runner.model.modules() if getattr(m, "hpc_experts", None)))

    def _say(self, experts: Experts) -> None:
        first, second = self.norms
        norms = f", with the norm in front of {first}" if first else ""
        norms += f" and of {second} projections" if second else ""
        self.record.used(MOE, f"{experts.describe()}, in {self.layers} layers{norms}")

    def quant_info(self, original: Any, method: Any, layer: Any) -> Any:
        """Fp8MoEMethod._get_hpc_ops_quant_info, at every call of a layer: the layer's Experts where it has one."""
        experts = getattr(layer, "hpc_experts", None)
        return original(method, layer) if experts is None else experts
