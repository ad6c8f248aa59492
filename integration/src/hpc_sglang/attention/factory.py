"""Makes the backend for one of SGLang's model runners: gathers the facts, refuses, composes with a prefill backend."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .. import compat
from ..record import record
from . import FLAG, NAME, prologue
from .backend import HpcAttentionBackend
from .limits import Server, refusal

_GPU_PREFILL = "prefill has no GPU kernel yet; give --prefill-attention-backend fa3, flashinfer or triton beside it"


def create(runner: Any) -> Any:
    """The attention backend of ``runner`` (SGLang's ModelRunner).

    Returns ours; on a GPU where the flags name it for prefill too, SGLang's pair of the best installed prefill backend
    and ours. Raises ValueError with the flag and the reason for what it cannot serve.
    """
    prefill, decode = compat.attention_backends(runner)
    server = facts(runner, FLAG if prefill == decode else _split_flag(decode))
    layers = compat.attention_layers(runner)
    on_gpu = runner.device != "cpu"
    reason = refusal(server, layers)
    if not reason and on_gpu and decode != NAME:
        reason = f"{server.flag}: {_GPU_PREFILL}"
    if reason:
        raise ValueError(reason)
    ours = HpcAttentionBackend(runner, server, layers)
    plans = [plan for made in ours.plans.values() for plan in made.values()]
    size = sum(plan.workspace_bytes for plan in plans) / 2**20
    hint = ", which a lower --max-running-requests makes smaller" if size > 512 else ""  # batch-invariant plans
    said = (
        f"decode by hpc_attention ({len(ours.shapes)} layers, {len(plans)} plan(s), {size:.1f} MiB of workspace{hint})"
    )
    said += _place_prologue(runner, ours)
    if prefill != NAME or not on_gpu:
        record.note(f"attention: {said}; prefill by {'hpc_attention' if prefill == NAME else prefill}")
        return ours
    best = best_prefill()
    record.note(f"attention: {said}; prefill by {best}, the best installed: hpc_attention has no GPU kernel for it yet")
    pair = compat.find("sglang.srt.layers.attention.hybrid_attn_backend:HybridAttnBackend")
    backends = compat.find("sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS")
    made = pair(runner, prefill_backend=backends[best](runner), decode_backend=ours)
    # Draft chains are verified by ours: the user has chosen no prefill backend that --speculative-attention-mode could
    # mean (its default is prefill).
    made.spec_attn_is_decode, made.spec_attn_is_prefill = True, False
    made.needs_cpu_seq_lens = ours.needs_cpu_seq_lens
    return made


def _place_prologue(runner: Any, ours: HpcAttentionBackend) -> str:
    """Take over what comes before decode attention where it is known; what was done, for the record."""
    try:
        placed = prologue.install(runner.model, ours)
    except (AttributeError, compat.Missing) as error:  # another SGLang's module: it works as it is
        return f", Q/K norm and rotation by SGLang ({error})"
    return f", with Q/K norm, rotation and store in one kernel in {placed} of them" if placed else ""


def facts(runner: Any, flag: str) -> Server:
    """What the limits must know of a runner."""
    algorithm, topk, draft_tokens = compat.speculative(runner)
    config = runner.model_config
    return Server(
        dtype=runner.dtype,
        kv_dtype=runner.kv_cache_dtype,
        device=runner.device,
        page_size=runner.page_size,
        context_len=config.context_len,
        deterministic=compat.deterministic(runner),
        speculative=algorithm,
        topk=topk,
        draft_tokens=draft_tokens,
        draft_worker=runner.is_draft_worker,
        mla=runner.use_mla_backend,
        encoder_decoder=config.is_encoder_decoder,
        context_parallel_decode=compat.decode_context_parallel(),
        local_attention=getattr(config, "attention_chunk_size", None) is not None,
        flag=flag,
    )


def best_prefill() -> str:
    """The name of the best prefill backend that is installed: fa3, flashinfer or, always there, triton."""
    try:
        import_module("sgl_kernel.flash_attn")  # raises where its library for this GPU is missing
        return "fa3"
    except ImportError:
        return "flashinfer" if find_spec("flashinfer") else "triton"


def _split_flag(decode: str | None) -> str:
    return f"--{'decode' if decode == NAME else 'prefill'}-attention-backend {NAME}"
