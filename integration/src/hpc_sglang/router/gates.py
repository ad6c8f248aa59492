"""The gates that hpc_router_gemm takes over, and how each model's code is reached where x is still bf16.

Nothing is replaced in a class: an instance gets a forward of its own, which goes back to the model's where x is not
bf16. Every gate owns a RouterWeight, made at load and written again by ``refresh``.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hpc_router_gemm
import torch

from .. import compat
from ..counters import count
from .rewrite import keep_bf16

_ATTRIBUTE = "hpc_gate"


class Gate:
    """One gate's weight. source: returns the model's weight [N, K] as it is now. chooses: experts are chosen here."""

    def __init__(
        self, source: Callable[[], torch.Tensor], terms: int, batch_invariant: bool, chooses: bool = False
    ) -> None:
        self.source = source
        self.weight = hpc_router_gemm.RouterWeight(source().detach(), terms)
        self.batch_invariant = batch_invariant
        self.chooses = chooses

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] bf16 -> [M, N] fp32."""
        count("router.gemm")
        return hpc_router_gemm.router_gemm(x, self.weight, batch_invariant=self.batch_invariant)

    def choose(self, x: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """x [M, K] bf16 -> the k likeliest experts' weights (softmax over all) and ids [M, k], fp32 and int32."""
        count("router.route")
        ids, weights = hpc_router_gemm.route(x, self.weight, k, renormalize=renormalize)
        return weights, ids

    def refresh(self) -> None:
        """Read the model's weight again, into the memory that captured graphs read."""
        self.weight.update_(self.source().detach())


@dataclass
class Found:
    """What ``install`` did: gates by the model's class (choices: those that also choose), and why some were left."""

    gates: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    terms: set[int] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    def __add__(self, other: "Found") -> "Found":
        return Found(
            self.gates + other.gates, self.choices + other.choices, self.terms | other.terms, self.left | other.left
        )

    def describe(self) -> str:
        """For the record."""
        gates = ", ".join(f"{number} of {name}" for name, number in sorted(self.gates.items()))
        terms = " or ".join(str(number) for number in sorted(self.terms))
        what = "hpc_router_gemm.router_gemm for the gates"
        if self.choices:
            what = "hpc_router_gemm.route for the gates and the choice of experts"
        return f"{what} ({gates}), {terms} bf16 term{'' if terms == '1' else 's'}"


@dataclass(frozen=True)
class Plan:
    """How one gate is taken over. terms: of an fp32 weight. attach: puts it in place. chooses: experts too."""

    weight: Callable[[], torch.Tensor]
    terms: int
    attach: Callable[[Gate], None]
    chooses: bool = False


class Left(Exception):
    """A gate stays with the model, for the reason given; a reason of "" is not worth a line."""


def install(model: torch.nn.Module, terms: int | None, batch_invariant: bool) -> Found:
    """Take over every gate of ``model`` that is known here; one that is taken over already is refreshed.

    terms: of every fp32 weight; None: the plan's.
    """
    found = Found()
    for module in model.modules():
        maker = _maker(module)
        if maker is None:
            continue
        name, make = maker
        if not hasattr(module, _ATTRIBUTE):
            try:
                plan = make(module)
                if plan.chooses and batch_invariant:  # hpc_router_gemm.route has no such form
                    continue
            except Left as reason:
                if str(reason):
                    found.left.add(f"{name}'s gate stays SGLang's: {reason}")
                continue
            gate = Gate(plan.weight, terms or plan.terms, batch_invariant, plan.chooses)
            setattr(module, _ATTRIBUTE, gate)
            plan.attach(gate)
        else:
            gate = getattr(module, _ATTRIBUTE)
            gate.refresh()
        found.gates[name] += 1
        found.choices[name] += gate.chooses
        found.terms.add(gate.weight.terms)
    return found


def refresh(model: torch.nn.Module) -> None:
    """Read every gate's weight again."""
    for module in model.modules():
        gate = getattr(module, _ATTRIBUTE, None)
        if isinstance(gate, Gate):
            gate.refresh()


def _maker(module: torch.nn.Module) -> tuple[str, Callable[[Any], Plan]] | None:
    """The class of SGLang's that ``module`` is one of, and its plan's maker."""
    for base in type(module).__mro__:
        if base.__name__ in MAKERS and base.__module__.startswith("sglang.srt.models."):
            return base.__name__, MAKERS[base.__name__]
    return None


def _usable(weight: torch.Tensor, bias: Any = None) -> None:
    """Raises Left where hpc_router_gemm does not take the gate."""
    if bias is not None:
        raise Left("it has a bias")
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise Left(f"its weight is {weight.dtype}")
    if weight.dim() != 2 or weight.shape[1] % 8:
        raise Left(f"its weight is {list(weight.shape)}; a multiple of 8 columns is needed")
    reason = hpc_router_gemm.why_not("router_gemm", device=weight.device, weight_dtype=weight.dtype)
    if reason:
        raise Left(reason)


def _wrap(owner: Any, name: str, result: Callable[[torch.Tensor], Any]) -> None:
    """Have ``owner.name(x)`` be ``result(x)`` for a bf16 [M, K] x, and what it was for any other."""
    original = getattr(owner, name)

    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype == torch.bfloat16 and x.dim() == 2:
            return result(x if x.stride(1) == 1 and x.stride(0) % 8 == 0 else x.contiguous())
        return original(x, *args, **kwargs)

    setattr(owner, name, call)


def _linear_gate(gate: Any) -> tuple[Callable[[], torch.Tensor], Callable[[Any], None]]:
    """(weight, attach) of a ReplicatedLinear that stands as a gate; it returns (scores, no bias)."""
    _usable(gate.weight, gate.bias)
    return (lambda: gate.weight), (lambda ours: _wrap(gate, "forward", lambda x: (ours.scores(x), None)))


def _longcat(router: Any) -> Plan:
    """LongcatFlashRouter.forward(x): two terms where SGLang's own kernel has them, else fp32."""
    if router.rounter_params_dtype != torch.float32:
        raise Left("")
    _usable(router.classifier.weight, router.classifier.bias)
    terms = 2 if router.hpc_kernel_min_m is not None else 3
    return Plan(lambda: router.classifier.weight, terms, lambda ours: _wrap(router, "forward", ours.scores))


def _glm4(gate: Any) -> Plan:
    """Glm4MoeGate.forward(x) casts x, and in earlier versions the weight, to fp32."""
    _usable(gate.weight)
    return Plan(lambda: gate.weight, 3, lambda ours: _wrap(gate, "forward", ours.scores))


def _cast_before_gate(block: Any) -> Plan:
    """Blocks whose code has ``self.gate(hidden_states.to(torch.float32))``: HunYuan V3, MiniMax M2."""
    weight, attach = _linear_gate(block.gate)
    methods = keep_bf16(type(block))
    if not methods:
        raise Left("its code is not the one known here")

    def place(ours: Gate) -> None:
        attach(ours)
        for name, function in methods.items():
            setattr(block, name, function.__get__(block))

    return Plan(weight, 3, place)


def _minimax_m3(block: Any) -> Plan:
    """MiniMax M3 has a method for the scores; under SGLANG_OPT_USE_BF16_ROUTER_GEMM its weight is bf16."""
    if block.bf16_router_gemm:
        raise Left("")
    _usable(block.gate.weight, block.gate.bias)
    return Plan(lambda: block.gate.weight, 3, lambda ours: _wrap(block, "_compute_router_logits", ours.scores))


def _step3p5(block: Any) -> Plan:
    """Step3.5 casts x and its bf16 weight to fp32 where need_fp32_gate is set, else it calls the gate with x."""
    if not block.need_fp32_gate:
        raise Left("")
    weight, attach = _linear_gate(block.gate)

    def place(ours: Gate) -> None:
        attach(ours)
        block.need_fp32_gate = False

    return Plan(weight, 3, place)


def _qwen3_moe(block: Any) -> Plan:
    """A bf16 gate whose scores only a softmax's choice reads: gate and choice in one call, scores not cut to bf16.

    The choice goes in as SGLang's custom routing function, so that what SGLang does with ids after a choice stays. The
    scores that the gate then returns are nobody's: memory of their shape.
    """
    config = block.topk.topk_config
    plain = not config.use_grouped_topk and config.scoring_func == "softmax"
    free = config.correction_bias is None and config.custom_routing_function is None
    free = free and getattr(config.output_format, "name", "STANDARD") == "STANDARD"  # None: the runner's
    if not (plain and free and compat.experts_take_ids()):
        raise Left("")
    gate = block.gate
    _usable(gate.weight, gate.bias)
    if gate.weight.dtype != torch.bfloat16:
        raise Left("")

    def place(ours: Gate) -> None:
        def choose(
            hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return ours.choose(hidden_states, topk, renormalize)

        config.custom_routing_function = choose
        _wrap(gate, "forward", lambda x: (x.new_empty((x.shape[0], len(gate.weight))), None))

    return Plan(lambda: gate.weight, 1, place, chooses=True)


MAKERS: dict[str, Callable[[Any], Plan]] = {
    "LongcatFlashRouter": _longcat,
    "Glm4MoeGate": _glm4,
    "HYV3MoEFused": _cast_before_gate,
    "MiniMaxM2MoE": _cast_before_gate,
    "MiniMaxM3MoE": _minimax_m3,
    "Step3p5MoEMLP": _step3p5,
    "Qwen3MoeSparseMoeBlock": _qwen3_moe,
}
