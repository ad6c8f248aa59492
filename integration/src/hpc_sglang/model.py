"""What the operators must know of a model, from its config.json alone. Needs neither SGLang nor the weights."""

import json
import pathlib
from dataclasses import dataclass
from typing import Any


class BadInput(ValueError):
    """A model or a flag that cannot be used, in one line."""


@dataclass(frozen=True)
class Model:
    """A model's sizes, on all ranks together. 0 or None where the model has no such thing.

    quant: "block", "tensor" (FP8 with static activation scales) or, in words, why its experts are neither.
    """

    architecture: str
    config: dict[str, Any]
    dtype: str
    context_len: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    logit_cap: float
    mla: bool
    encoder_decoder: bool
    num_experts: int
    top_k: int
    expert_inner: int
    activation: str
    swiglu_clamp: float | None
    quant: str


def read(path: str) -> Model:
    """The model whose config.json is ``path`` or lies in the folder ``path``. Raises BadInput."""
    file = pathlib.Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        wanted = "a folder with config.json, or that file"
        raise BadInput(f"--model-path: expected {wanted}, got {path} ({error.strerror})") from None
    except ValueError:
        raise BadInput(f"--model-path: {file} is not JSON") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise BadInput(f"--model-path: {file} names no architectures")
    return describe(config)


def _first(config: dict[str, Any], *names: str, default: Any = 0) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def describe(outer: dict[str, Any]) -> Model:
    """A config.json's contents as a Model; that of a language model inside another counts."""
    inner = outer.get("text_config")
    config = {**outer, **inner} if isinstance(inner, dict) else outer
    hidden = _first(config, "hidden_size")
    heads = _first(config, "num_attention_heads")
    experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    window = _first(config, "sliding_window", default=None)
    if config.get("use_sliding_window") is False:
        window = None
    limits = config.get("swiglu_limits") or [0]
    clamp = max((limit or 0 for limit in limits), default=0) or None
    return Model(
        architecture=outer["architectures"][0],
        config=config,
        dtype=str(_first(config, "dtype", "torch_dtype", default="bfloat16")).removeprefix("torch."),
        context_len=_first(config, "max_position_embeddings", "max_seq_len"),
        hidden=hidden,
        num_q_heads=heads,
        num_kv_heads=_first(config, "num_key_value_heads", "num_attention_groups", default=heads),
        head_dim=_first(config, "head_dim", default=hidden // heads if heads else 0),
        window=window,
        logit_cap=float(_first(config, "attn_logit_softcapping", default=0.0)),
        mla=config.get("kv_lora_rank") is not None,
        encoder_decoder=bool(config.get("is_encoder_decoder")),
        num_experts=experts,
        top_k=_first(config, "num_experts_per_tok", "moe_topk", "moe_top_k", default=1) if experts else 0,
        expert_inner=_first(config, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
        activation=_first(config, "hidden_act", default="silu"),
        swiglu_clamp=clamp,
        quant=_quant(config),
    )


def _quant(config: dict[str, Any]) -> str:
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return "the checkpoint's experts are not FP8"
    if found.get("quant_method") != "fp8":
        return f"the checkpoint's experts are not in SGLang's fp8 format (quant_method {found.get('quant_method')})"
    block = found.get("weight_block_size")
    if block is not None:
        return "block" if list(block) == [128, 128] else f"weight_block_size: expected [128, 128], got {block}"
    if found.get("activation_scheme") != "static":
        return "per-tensor FP8 needs static activation scales (activation_scheme static in the checkpoint)"
    return "tensor"
