"""Router GEMM: the gates of the models that have one known here, through hpc_router_gemm.

``gates`` takes over the gates of a model after it is loaded; ``linear`` is for SGLang's function linear_bf16_fp32.
HPC_SGLANG_ROUTER=0 turns both off. HPC_SGLANG_ROUTER_TERMS=1, 2 or 3 sets the bf16 terms of fp32 weights; without it
a gate has three, which is as exact as fp32, and two only where SGLang's own kernel has two.
"""

import os
from typing import Any
from weakref import WeakKeyDictionary

from .. import compat
from ..record import ROUTER, Record, logger

SWITCH, TERMS = "HPC_SGLANG_ROUTER", "HPC_SGLANG_ROUTER_TERMS"


def terms_asked() -> int | None:
    """HPC_SGLANG_ROUTER_TERMS, None where it is not set. Raises ValueError for anything but 1, 2 and 3."""
    text = os.environ.get(TERMS, "")
    if text not in ("", "1", "2", "3"):
        raise ValueError(f"{TERMS}: expected 1, 2 or 3, got {text!r}")
    return int(text) if text else None


def register(record: Record) -> None:
    """Hook the loading and the updating of models, and linear_bf16_fp32; ``record`` says what came of it."""
    if os.environ.get(SWITCH, "1") == "0":
        record.not_used(ROUTER, f"{SWITCH}=0 in the environment")
        return
    import hpc_router_gemm

    reason = hpc_router_gemm.why_not("router_gemm")
    if reason:
        record.not_used(ROUTER, reason)
        return
    record.used(ROUTER, "registered; runs the gates of the models that have them")
    hooks = RouterHooks(record, terms_asked())
    compat.hook_methods("after", compat.MODEL_RUNNER, "ModelRunner", compat.MODEL_LOADS, hooks.loaded, hooks.failed)
    compat.hook_methods(
        "around", compat.WEIGHT_UPDATER, "WeightUpdater", compat.WEIGHT_UPDATES, hooks.updated, hooks.failed
    )
    module = compat.find_module(*compat.LINEAR_BF16_FP32)
    compat.hook("around", f"{module}:linear_bf16_fp32", hooks.linear, hooks.failed)
    compat.hook("around", f"{module}:hpc_bf16xfp32_gemm_enabled", hooks.keeps_old_weights, hooks.failed)


class RouterHooks:
    """The hooks, and what they share.

    active: whether gates may be taken over. deterministic, two_terms: what the server was started with, known once a
    model is loaded; read at every call, so not asked for again.
    """

    def __init__(self, record: Record, terms: int | None) -> None:
        self.record = record
        self.terms = terms
        self.active = True
        self.deterministic = self.two_terms = False
        self._found: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # model, or draft model -> gates.Found

    def failed(self, reason: str) -> None:
        """A hook could not be placed; without those of updates, weights could be old ones: nothing is used then."""
        self.active = False
        self.record.not_used(ROUTER, reason)

    def loaded(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        """After ModelRunner has loaded a model: take its gates over, or their weights again."""
        import torch

        from . import gates

        if not self.active:
            return
        self.deterministic, self.two_terms = compat.deterministic(), compat.two_term_linear()
        if runner.model_config.dtype != torch.bfloat16:
            self.record.not_used(ROUTER, f"the model runs in {runner.model_config.dtype}, not bfloat16")
            return
        try:
            self._found[runner.model] = gates.install(runner.model, self.terms, self.deterministic)
        except Exception as error:
            text = str(error).strip().splitlines()
            self.record.not_used(ROUTER, f"taking the gates over failed: {text[0] if text else type(error).__name__}")
            logger.exception("hpc-sglang: taking the gates over failed")
            return
        found = sum(self._found.values(), gates.Found())
        for reason in found.left:
            self.record.note(f"router: {reason}")
        if found.gates:
            self.record.used(ROUTER, found.describe())
        else:
            self.record.not_used(ROUTER, "this model has no gate that is known here")

    def updated(self, original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the methods that update weights: the gates read the new ones from then on, whatever the outcome."""
        from . import gates

        try:
            return original(updater, *args, **kwargs)
        finally:
            gates.refresh(updater.get_model())

    def linear(self, original: Any, x: Any, y: Any, hpc_kernel_min_m: int | None = None) -> Any:
        """linear_bf16_fp32; hpc_kernel_min_m is given where SGLang has a kernel of two terms for the weight's size."""
        import torch

        from .linear import linear_bf16_fp32

        # A bf16 weight has nothing to lose in SGLang's function. An fp32 one never goes there: its kernel of two terms
        # keeps a split weight that no update reaches.
        if not self.active or y.dtype != torch.float32:
            return original(x, y, hpc_kernel_min_m=hpc_kernel_min_m)
        two_terms = hpc_kernel_min_m is not None or self.two_terms
        return linear_bf16_fp32(x, y, self.terms or (2 if two_terms else 3), self.deterministic)

    def keeps_old_weights(self, original: Any) -> bool:
        """hpc_bf16xfp32_gemm_enabled, by which SGLang refuses weight updates: no split weight of its own is in use."""
        return False if self.active else original()
