"""What the attention backend does not do, found when a server starts and said with the flag that asked for it.

Nothing here touches a GPU or SGLang: the facts about a server are gathered into ``Server`` (by ``factory``), and
``refusal`` reads them. Sizes and dtypes are hpc_attention's own limits, asked of ``hpc_attention.why_not``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hpc_attention import why_not
from hpc_attention.support import MAX_Q_LEN, MAX_SEQ_LEN

_TARGET_ONLY = "give the draft model another one: --speculative-draft-attention-backend fa3 (or triton)"


@dataclass(frozen=True)
class Shape:
    """What layers must have in common to share a plan. window: keys a row sees, itself included; None: all."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True)
class Server:
    """What the backend must know of a server.

    dtype, kv_dtype: of queries and of the KV cache. context_len: longest request. draft_tokens: rows that a request
    has when drafts are verified, 1 without speculative decoding; topk: branches of a draft (0 without). draft_worker:
    whether the backend would be a draft model's. flag: what asked for the backend.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: str
    page_size: int
    context_len: int
    deterministic: bool = False
    speculative: str | None = None
    topk: int = 0
    draft_tokens: int = 1
    draft_worker: bool = False
    mla: bool = False
    encoder_decoder: bool = False
    context_parallel_decode: int = 1
    local_attention: bool = False
    flag: str = "--attention-backend hpc"


def shape_of(layer: Any) -> Shape:
    """The shape of one of SGLang's RadixAttention layers, whose sliding_window_size counts one key less than ours."""
    window = layer.sliding_window_size
    windowed = window is not None and window > -1
    return Shape(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, window + 1 if windowed else None)


def refusal(server: Server, layers: Iterable[Any]) -> str:
    """Why the backend cannot serve these layers, with the flag that asked for it; "" where it can."""
    reason = _server_refusal(server)
    for layer in layers if not reason else ():
        reason = _layer_refusal(server, layer)
        if reason:
            reason = f"layer {layer.layer_id}: {reason}"
            break
    return f"{server.flag}: {reason}" if reason else ""


def _server_refusal(server: Server) -> str:
    if server.mla:
        return "multi-head latent attention (MLA) is not supported; use the model's default backend"
    if server.encoder_decoder:
        return "cross attention is not supported"
    if server.context_parallel_decode > 1:
        return f"decode context parallelism is not supported, got a size of {server.context_parallel_decode}"
    if server.context_len > MAX_SEQ_LEN:
        return f"a context of at most {MAX_SEQ_LEN:,} tokens is supported, got {server.context_len:,}"
    if server.speculative is None:
        return ""
    if server.draft_worker:
        reason = "a draft model's own steps (multi-step container, DRAFT_EXTEND_V2) are not supported"
        return f"{reason}; {_TARGET_ONLY}"
    if server.topk != 1:
        trees = f"speculative decoding is supported for chains (topk 1), got topk {server.topk}"
        return f"{trees} ({server.speculative}); set --speculative-eagle-topk 1"
    if server.draft_tokens > MAX_Q_LEN:
        return f"at most {MAX_Q_LEN} draft tokens are verified, got {server.draft_tokens}"
    return ""


def _layer_refusal(server: Server, layer: Any) -> str:
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if layer.is_cross_attention or kind != "decoder":
        return f"only causal self-attention is supported, got {'cross attention' if kind == 'decoder' else kind}"
    if layer.v_head_dim != layer.head_dim or layer.qk_head_dim != layer.head_dim:
        return f"one head_dim for queries, keys and values is supported, got {layer.qk_head_dim} and {layer.v_head_dim}"
    if layer.use_irope and server.local_attention:
        return "chunked local attention is not supported"
    if getattr(layer, "xai_temperature_len", -1) > 0:
        return "a temperature that depends on the position is not supported"
    if layer.pos_encoding_mode != "NONE":
        return f"position encodings inside attention are not supported, got {layer.pos_encoding_mode}"
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        return f"the logit cap is a tanh, got {layer.logit_capping_method}"
    shape = shape_of(layer)
    return why_not(
        q_dtype=server.dtype,
        kv_dtype=server.kv_dtype,
        head_dim=shape.head_dim,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        page_size=server.page_size,
        q_len=server.draft_tokens,
        window=shape.window,
        softcap=layer.logit_cap > 0,
        batch_invariant=server.deterministic,
        device=server.device,
    )
