"""What SGLang would use of each operator on this machine, for a model's config.json and SGLang's flags, and why not.

``python -m hpc_sglang`` and ``hpc doctor`` print it. It is foretold from the same tables that decide at start; what
only a running server knows (a layer's own settings) is decided there.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from . import compat, flags, plugin, router
from .model import BadInput, Model, read
from .record import ATTENTION, MOE, ROUTER, Entry, Record

# Architecture -> the class whose gate is taken over.
GATES = {
    "HYV3ForCausalLM": "HYV3MoEFused",
    "Glm4MoeForCausalLM": "Glm4MoeGate",
    "Glm4vMoeForConditionalGeneration": "Glm4MoeGate",
    "MiniMaxM2ForCausalLM": "MiniMaxM2MoE",
    "MiniMaxM3SparseForCausalLM": "MiniMaxM3MoE",
    "MiniMaxM3SparseForConditionalGeneration": "MiniMaxM3MoE",
    "Step3p5ForCausalLM": "Step3p5MoEMLP",
    "Step3p7ForConditionalGeneration": "Step3p5MoEMLP",
    "LongcatFlashForCausalLM": "LongcatFlashRouter",
    "Qwen3MoeForCausalLM": "Qwen3MoeSparseMoeBlock",
}
# (hidden size, experts with the zero ones) for which SGLang has a kernel of two terms.
LONGCAT_TWO_TERMS = {(6144, 768), (3072, 384)}


@dataclass(frozen=True)
class Report:
    """versions: a line on versions. device: the device a server would use. entries: one an operator.

    refused: whether something that is asked for by flag can't be had, so that the server would not start.
    """

    versions: str
    device: str
    model: str
    entries: list[Entry]
    refused: bool

    def lines(self) -> list[str]:
        """For people."""
        head = [self.versions, f"device: {self.device}", *([f"model: {self.model}"] if self.model else [])]
        return head + [entry.line() for entry in self.entries]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """SGLang's flags that matter here, by SGLang's names; all others are ignored. Raises BadInput."""
    parser = argparse.ArgumentParser(prog="python -m hpc_sglang", add_help=False, allow_abbrev=False)
    parser.error = _bad_input  # type: ignore[method-assign]
    parser.add_argument("--model-path", "--model")
    for flag in (*flags.ATTENTION_FLAGS, *flags.MOE_FLAGS):
        parser.add_argument(f"--{flag.replace('_', '-')}")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1, dest="tp_size")
    parser.add_argument("--ep-size", "--expert-parallel-size", "--ep", type=int, default=1, dest="ep_size")
    parser.add_argument("--moe-a2a-backend", default="none")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--speculative-eagle-topk", type=int, default=1)
    parser.add_argument("--speculative-num-draft-tokens", type=int, default=1)
    return parser.parse_known_args(arguments)[0]


def _bad_input(message: str) -> Any:
    raise BadInput(message)


def examine(arguments: Sequence[str] = (), *, with_sglang: bool = False) -> Report:
    """The report for SGLang's flags ``arguments``.

    with_sglang: also import the installed SGLang and place the hooks in this process, which takes seconds and finds
    what a version does not have. Raises BadInput for a model or flag that cannot be used.
    """
    asked = parse(arguments)
    model = read(asked.model_path) if asked.model_path else None
    if model:
        _check_ranks(asked, model)
    device = _device(asked.device)
    record = Record()
    if with_sglang and compat.sglang_version():
        record = _placed()
    entries = []
    for operator in plugin.OPERATORS:
        reason = record.reason(operator.name) or plugin.why_not_installed(operator) or _why_no_sglang()
        if reason:
            entries.append(Entry(operator.name, False, reason))
        else:
            entries.append(_FORETELL[operator.name](asked, model, device))
    known = Record()
    known.entries = {entry.operator: entry for entry in entries}
    refused = bool(flags.refusals(asked, known))
    return Report(_versions(), _device_line(device), _model_line(model), entries, refused)


def _check_ranks(asked: argparse.Namespace, model: Model) -> None:
    """BadInput where SGLang itself would not cut the model so."""
    tp, ep = asked.tp_size, asked.ep_size
    if tp < 1 or ep < 1 or tp % ep:
        raise BadInput(f"--tp-size {tp} --ep-size {ep}: expected whole numbers, the first a multiple of the second")
    if model.num_q_heads % tp:
        raise BadInput(f"--tp-size {tp}: expected a divisor of the model's {model.num_q_heads} query heads")
    if model.num_experts and (model.num_experts % ep or model.expert_inner % (tp // ep)):
        sizes = f"{model.num_experts} experts of {model.expert_inner}"
        raise BadInput(f"--tp-size {tp} --ep-size {ep}: the model's {sizes} can't be cut so")


def _placed() -> Record:
    """The record of this process after every hook was placed in the installed SGLang."""
    plugin.register()
    for name in (compat.MODEL_RUNNER, "sglang.srt.layers.quantization.fp8", *compat.LINEAR_BF16_FP32[:1]):
        try:
            compat.find(name)
        except compat.Missing:
            pass  # what hooks into it has no other place then, and says so
    return plugin.record


def _why_no_sglang() -> str:
    return "" if compat.sglang_version() else "sglang is not installed (pip install sglang)"


def _versions() -> str:
    versions = [f"hpc-sglang {plugin.installed('hpc-sglang')}"]
    if compat.sglang_version():
        versions.append(f"sglang {compat.sglang_version()}")
    versions += [
        f"{operator.distribution} {plugin.installed(operator.distribution)}"
        for operator in plugin.OPERATORS
        if plugin.installed(operator.distribution)
    ]
    note = compat.version_note()
    return ", ".join(versions) + (f"; {note}" if note else "")


def _device(name: str | None) -> str:
    try:
        import torch
    except ImportError:  # then no operator is there either
        return name or "cpu"
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def _device_line(device: str) -> str:
    try:
        from hpc_common.capability import capability

        machine = capability(device)
    except ImportError as error:
        return f"{device} ({error})"
    except ValueError as error:
        return str(error)
    verdict = "" if machine.usable else f", not usable: {machine.reason}"
    return device if device == "cpu" else f"{machine.device} ({machine.name}){verdict}"


def _model_line(model: Model | None) -> str:
    if model is None:
        return ""
    experts = f", {model.num_experts} experts of {model.expert_inner}" if model.num_experts else ""
    return f"{model.architecture}, hidden {model.hidden}, {model.dtype}{experts}"


def _dtype(name: str, model: Model) -> Any:
    import torch

    name = model.dtype if name == "auto" else name
    return {"half": torch.float16, "float16": torch.float16, "float": torch.float32, "float32": torch.float32}.get(
        name, torch.bfloat16
    )


def _attention(asked: argparse.Namespace, model: Model | None, device: str) -> Entry:
    import torch

    named = flags.asked(asked, flags.ATTENTION_FLAGS, flags.ATTENTION_NAME)
    if not named:
        return Entry(ATTENTION, False, f"--attention-backend {flags.ATTENTION_NAME} is not set")
    if model is None:
        return Entry(ATTENTION, True, f"by {named[0]}; give --model-path for what the model needs")
    from .attention import limits

    kv_dtype = {"auto": _dtype(asked.dtype, model), "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    server = limits.Server(
        dtype=_dtype(asked.dtype, model),
        kv_dtype=kv_dtype.get(asked.kv_cache_dtype, torch.bfloat16),
        device=device,
        page_size=asked.page_size,
        context_len=asked.context_length or model.context_len,
        deterministic=asked.enable_deterministic_inference,
        speculative=asked.speculative_algorithm,
        topk=asked.speculative_eagle_topk,
        draft_tokens=asked.speculative_num_draft_tokens if asked.speculative_algorithm else 1,
        mla=model.mla,
        encoder_decoder=model.encoder_decoder,
        flag=named[0],
    )
    layers = [_attention_layer(model, asked.tp_size, window) for window in {None, model.window}]
    reason = limits.refusal(server, layers).removeprefix(f"{named[0]}: ")
    return Entry(ATTENTION, not reason, reason or f"hpc_attention.decode, by {named[0]}")


def _attention_layer(model: Model, tp: int, window: int | None) -> Any:
    """One of the model's layers as SGLang would have it on one rank; SGLang's windows count one key less."""
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=model.num_q_heads // tp,
        tp_k_head_num=max(model.num_kv_heads // tp, 1),
        head_dim=model.head_dim,
        qk_head_dim=model.head_dim,
        v_head_dim=model.head_dim,
        sliding_window_size=-1 if window is None else window - 1,
        logit_cap=model.logit_cap,
        logit_capping_method="tanh",
        attn_type="decoder",
        is_cross_attention=False,
        use_irope=False,
        xai_temperature_len=-1,
        pos_encoding_mode="NONE",
    )


def _router(asked: argparse.Namespace, model: Model | None, device: str) -> Entry:
    import hpc_router_gemm
    import torch

    if os.environ.get(router.SWITCH, "1") == "0":
        return Entry(ROUTER, False, f"{router.SWITCH}=0 in the environment")
    try:
        override = router.terms_asked()
    except ValueError as error:
        return Entry(ROUTER, False, str(error))
    reason = hpc_router_gemm.why_not("router_gemm", device=device)
    if reason or model is None:
        return Entry(ROUTER, not reason, reason or "for the models that have a gate known here")
    gate = GATES.get(model.architecture)
    if gate is None:
        return Entry(ROUTER, False, "this model has no gate that is known here")
    if _dtype(asked.dtype, model) != torch.bfloat16:
        return Entry(ROUTER, False, f"the model runs in {_dtype(asked.dtype, model)}, not bfloat16")
    config, terms = model.config, 3
    if gate == "Step3p5MoEMLP":
        if not config.get("need_fp32_gate"):
            return Entry(ROUTER, False, "this model's gates are not fp32 (need_fp32_gate)")
        terms = 1
    if gate == "Qwen3MoeSparseMoeBlock":
        if asked.enable_deterministic_inference:
            return Entry(ROUTER, False, "this model's choice of experts has no batch-invariant form")
        terms = 1
    if gate == "LongcatFlashRouter":
        if config.get("router_bias") or config.get("rounter_params_dtype", "float32") != "float32":
            return Entry(ROUTER, False, "this model's router has a bias or is not fp32")
        if (model.hidden, model.num_experts + (config.get("zero_expert_num") or 0)) in LONGCAT_TWO_TERMS:
            terms = 2
    if model.hidden % 8:
        return Entry(ROUTER, False, f"a multiple of 8 columns is needed, got {model.hidden}")
    if terms > 1:  # a bf16 weight is one term, whatever is asked
        terms = override or terms
    what = f"the gates of {gate}{' and the choice of experts' if gate == 'Qwen3MoeSparseMoeBlock' else ''}"
    return Entry(ROUTER, True, f"{what}, {terms} bf16 term{'' if terms == 1 else 's'}")


def _moe(asked: argparse.Namespace, model: Model | None, device: str) -> Entry:
    import hpc_moe

    named = flags.asked(asked, flags.MOE_FLAGS, flags.MOE_NAME)
    if not named:
        return Entry(MOE, False, f"--moe-runner-backend {flags.MOE_NAME} is not set")
    reason = hpc_moe.why_not("block", device=device)
    if not reason and asked.moe_a2a_backend != "none":
        reason = f"experts behind --moe-a2a-backend {asked.moe_a2a_backend} are not supported"
    if not reason and asked.enable_lora:
        reason = "LoRA on experts (--enable-lora) is not supported"
    if reason or model is None:
        return Entry(MOE, not reason, reason or f"by {named[0]}; give --model-path for what the model needs")
    if not model.num_experts:
        return Entry(MOE, False, "this model has no experts")
    if model.quant not in ("block", "tensor"):
        return Entry(MOE, False, model.quant)
    experts = _experts(asked, model)
    reason = experts.why_not()
    return Entry(MOE, not reason, reason or f"{experts.describe()}, by {named[0]}")


def _experts(asked: argparse.Namespace, model: Model) -> Any:
    """One layer's experts on one rank, of tensors without memory."""
    import torch

    from .moe.experts import Experts

    local, inner = model.num_experts // asked.ep_size, model.expert_inner // (asked.tp_size // asked.ep_size)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    block = model.quant == "block"
    made = {
        "w13_weight": tensor(local, 2 * inner, model.hidden, dtype=torch.float8_e4m3fn),
        "w2_weight": tensor(local, model.hidden, inner, dtype=torch.float8_e4m3fn),
        "w13_weight_scale_inv": tensor(local, 2 * inner // 128, model.hidden // 128),
        "w2_weight_scale_inv": tensor(local, model.hidden // 128, inner // 128),
        **{name: tensor(local) for name in ("w13_weight_scale", "w2_weight_scale")},
        **{name: tensor(1) for name in ("w13_input_scale", "w2_input_scale")},
    }
    config = SimpleNamespace(
        activation=model.activation,
        is_gated=True,
        apply_router_weight_on_input=False,
        no_combine=False,
        gemm1_alpha=None,
        gemm1_clamp_limit=model.swiglu_clamp,
        params_dtype=_dtype(asked.dtype, model),
        num_fused_shared_experts=0,
        top_k=model.top_k,
        swiglu_limit=None,
        routed_scaling_factor=None,
    )
    layer = SimpleNamespace(
        **made, moe_runner_config=config, moe_ep_rank=0, moe_ep_size=asked.ep_size, num_experts=model.num_experts
    )
    method = SimpleNamespace(block_quant=block, quant_config=SimpleNamespace(weight_block_size=[128, 128]))
    return Experts(layer, method, asked.enable_deterministic_inference)


_FORETELL = {ATTENTION: _attention, ROUTER: _router, MOE: _moe}
