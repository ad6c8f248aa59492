"""Prefill: bottom-right causal attention of new tokens over a paged cache that holds them and their prefix."""

import torch
from hpc_common.checks import check_dtype, check_int, check_same_device, check_shape, fail, shape_text

from . import _checks as checks
from . import _cpu
from .library import register
from .support import features

_WHERE = "hpc_attention.prefill"
_SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor cu_seqlens_q, Tensor seq_lens, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor? k_scale, Tensor? v_scale, Tensor? sinks, float k_factor, "
    "float v_factor, float sm_scale, float softcap, int window, int max_seqlen_q) -> ()"
)


def prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    sm_scale: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's newest tokens over its whole paged cache, chunked prefill included.

    Args:
        q: [T, Hq, D] bf16 or fp16, the requests' rows one after the other. D 64, 128 or 256; Hq / Hkv whole, 1 to 16.
        k_cache, v_cache: [pages, page_size, Hkv, D] of q's dtype or e4m3, page_size 1, 16, 32, 64, 128 or 256; any
            strides that are multiples of 16 bytes, each cache its own; they hold the new tokens already.
        page_table: [B, max_pages] int32.
        cu_seqlens_q: [B + 1] int32, row at which each request's tokens begin, from 0 to T.
        seq_lens: [B] int32, tokens in each cache, the new ones included.
        max_seqlen_q: at least the most new tokens of a request.
        sm_scale: of the scores, default D^-0.5.
        k_scale: multiplies stored keys: float, or fp32 [1], [Hkv] or [pages, page_size, Hkv].
        v_scale: multiplies stored values: float, or fp32 [1] or [Hkv].
        window: keys a row sees, itself included; None for all.
        softcap: c of c * tanh(score / c), applied after scaling.
        sinks: [Hq] fp32 logits that join the softmax's denominator.
        out: where to write, [T, Hq, D] of q's dtype.
        return_lse: also return the log-sum-exp of the scores, sinks left out.

    Row j of a request with n new tokens sees the positions below seq_len - n + j + 1; one that sees none gives zeros
    and lse -inf. Slots no row sees may hold anything, NaN included.

    Returns:
        out, or (out, lse) with lse fp32 [T, Hq], natural logarithm.

    Raises:
        TypeError, ValueError: naming argument, expected and got. Lengths and page ids are checked for CPU tensors.

    There is no gradient: results never require one, whatever the inputs do.
    """
    checks.check_query(_WHERE, q)
    checks.check_caches(_WHERE, q, k_cache, v_cache, "prefill")
    tokens, num_q_heads, head_dim = q.shape
    batch = _check_lengths(cu_seqlens_q, seq_lens, q)
    checks.check_page_table(_WHERE, page_table, batch, q)
    check_int(_WHERE, "max_seqlen_q", max_seqlen_q, 0, 1 << 30)
    if window is not None:
        check_int(_WHERE, "window", window, 1, 1 << 30)
    scale = checks.number(_WHERE, "sm_scale", sm_scale, head_dim**-0.5)
    k_tensor, k_factor = checks.check_scale(_WHERE, "k_scale", k_scale, k_cache, q, per_token=True)
    v_tensor, v_factor = checks.check_scale(_WHERE, "v_scale", v_scale, k_cache, q, per_token=False)
    checks.check_factors(_WHERE, scale, k_factor)
    cap = checks.check_softcap(_WHERE, softcap)
    checks.check_sinks(_WHERE, sinks, q)
    checks.check_bool(_WHERE, "return_lse", return_lse)
    if out is not None:
        checks.check_out(_WHERE, out, q)
    if not torch.compiler.is_compiling():
        _check_device(q, k_cache)
    if out is None:
        out = q.new_empty(q.shape)
    lse = q.new_empty((tokens, num_q_heads), dtype=torch.float32) if return_lse else None
    if tokens:
        _op(
            q, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens, out, lse, k_tensor, v_tensor, sinks,
            k_factor, v_factor, scale, cap, window or 0, max_seqlen_q,
        )  # fmt: skip
    return out if lse is None else (out, lse)


def _check_lengths(cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, q: torch.Tensor) -> int:
    """Types and shapes of both; returns the number of requests."""
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("seq_lens", seq_lens)):
        check_dtype(_WHERE, name, tensor, (torch.int32,))
        if tensor.dim() != 1 or (tensor.numel() > 1 and tensor.stride(0) != 1):
            fail(_WHERE, name, "a dense vector", f"{shape_text(tensor)}, strides {list(tensor.stride())}")
        check_same_device(_WHERE, name, tensor, q.device, "q")
    batch = seq_lens.shape[0]
    check_shape(_WHERE, "cu_seqlens_q", cu_seqlens_q, (batch + 1,))
    return batch


def _check_device(q: torch.Tensor, k_cache: torch.Tensor) -> None:
    used = features("prefill", q.dtype, k_cache.dtype, q.shape[2], q.shape[1] // k_cache.shape[2])
    checks.check_device(_WHERE, "prefill", used, q.device)


def _check_values(
    starts: list[int], lengths: list[int], tokens: int, max_seqlen_q: int, window: int, page_table: torch.Tensor,
    k_cache: torch.Tensor,
) -> None:  # fmt: skip
    """Values of the lengths and of the page ids in use."""
    new = [end - begin for begin, end in zip(starts, starts[1:], strict=False)]
    if starts[0] != 0 or starts[-1] != tokens or min(new, default=0) < 0:
        fail(_WHERE, "cu_seqlens_q", f"starts from 0 to {tokens} (rows of q) that never fall", starts)
    if max(new, default=0) > max_seqlen_q:
        fail(_WHERE, "max_seqlen_q", f"at least {max(new)} (most tokens of a request)", max_seqlen_q)
    checks.check_lengths(_WHERE, lengths, k_cache.shape[1], page_table.shape[1])
    visible = [
        (max(0, length - count + 1 - window) if window else 0, length) if count else (0, 0)
        for count, length in zip(new, lengths, strict=True)
    ]
    checks.check_page_ids(_WHERE, page_table, visible, k_cache.shape[1], k_cache.shape[0])


def _prefill_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_factor: float,
    v_factor: float,
    sm_scale: float,
    softcap: float,
    window: int,
    max_seqlen_q: int,
) -> None:
    checks.check_alignment(_WHERE, q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    _check_values(starts, lengths, q.shape[0], max_seqlen_q, window, page_table, k_cache)
    options = _cpu.Options(sm_scale * k_factor, k_scale, v_scale, v_factor, sinks, softcap)
    _cpu.prefill(q, k_cache, v_cache, page_table, starts, lengths, window, out, lse, options)


def _prefill_cuda(q: torch.Tensor, k_cache: torch.Tensor, *_: object) -> None:
    _check_device(q, k_cache)


_op = register("prefill", _SCHEMA, _prefill_cpu, _prefill_cuda)
