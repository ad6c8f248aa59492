"""Decode attention: each request's newest tokens over its paged cache, scheduled by a plan."""

import torch
from hpc_common.checks import fail
from hpc_common.schedule import DecodeSchedule

from . import _checks as checks
from . import _cpu, _cuda
from .library import register
from .plan import DecodePlan
from .support import features

_WHERE = "hpc_attention.decode"
# k_factor, v_factor: scales given as floats, 1 beside a tensor. softcap 0, window 0: none. The plan's host fields come
# as numbers (a kernel's grid and offsets depend on them alone), its map and workspace as tensors.
_SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor plan_map, Tensor(a!) workspace, "
    "Tensor(b!) out, Tensor(c!)? lse, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, Tensor? sinks, "
    "float k_factor, float v_factor, float sm_scale, float softcap, int q_len, int window, int num_ctas, "
    "int max_batch, int max_seq_len, bool batch_invariant) -> ()"
)


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: DecodePlan,
    sm_scale: float | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's ``plan.q_len`` newest tokens over its whole paged cache.

    Args:
        q: [B * q_len, Hq, D] bf16, fp16, or e4m3 with ``q_scale``. D 64, 128 or 256; Hq / Hkv whole, 1 to 16.
        k_cache, v_cache: [pages, page_size, Hkv, D]: q's dtype, or e4m3 with any q. Any strides that are multiples of
            16 bytes with a dense last dimension, each cache its own (NHD, HND, K and V in one buffer). They hold the
            q_len new tokens already.
        page_table: [B, max_pages] int32; token t of request b lies in page page_table[b, t // page_size].
        plan: made for these sizes and updated with this step's ``seq_lens``, which also fixes B. It may serve every
            layer of the step.
        sm_scale: of the scores, default D^-0.5.
        q_scale: multiplies an e4m3 q: fp32 [B * q_len, Hq].
        k_scale: multiplies stored keys: float, or fp32 [1], [Hkv] or [pages, page_size, Hkv].
        v_scale: multiplies stored values: float, or fp32 [1] or [Hkv].
        softcap: c of c * tanh(score / c), applied after scaling.
        sinks: [Hq] fp32 logits that join the softmax's denominator.
        out: where to write, [B * q_len, Hq, D], q's dtype (bf16 for an e4m3 q).
        return_lse: also return the log-sum-exp of the scores, sinks left out.

    Row j of a request sees the positions below seq_len - q_len + j + 1, at most the plan's ``window`` of them; a row
    that sees none gives zeros and lse -inf. Slots that no row sees may hold anything, NaN included.

    Returns:
        out, or (out, lse) with lse fp32 [B * q_len, Hq], natural logarithm.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, stride, device, option or plan, or a GPU problem
        without a kernel; the message names argument, expected and got. Lengths and page ids are checked for CPU
        tensors and, outside a capture, under HPC_DEBUG=1; otherwise the kernel bounds them.

    One call at a time may use a plan: its workspace holds the partial results. There is no gradient: results never
    require one, whatever the inputs do.
    """
    checks.check_query(_WHERE, q)
    checks.check_caches(_WHERE, q, k_cache, v_cache, "decode")
    _check_plan(plan, q, k_cache)
    checks.check_page_table(_WHERE, page_table, plan.batch, q)
    scale = checks.number(_WHERE, "sm_scale", sm_scale, q.shape[2] ** -0.5)
    checks.check_q_scale(_WHERE, q_scale, q)
    k_tensor, k_factor = checks.check_scale(_WHERE, "k_scale", k_scale, k_cache, q, per_token=True)
    v_tensor, v_factor = checks.check_scale(_WHERE, "v_scale", v_scale, k_cache, q, per_token=False)
    checks.check_factors(_WHERE, scale, k_factor)
    cap = checks.check_softcap(_WHERE, softcap)
    checks.check_sinks(_WHERE, sinks, q)
    checks.check_bool(_WHERE, "return_lse", return_lse)
    if out is not None:
        checks.check_out(_WHERE, out, q)
    window = min(plan.window or 0, plan.max_seq_len)
    if not torch.compiler.is_compiling():
        _check_device(q, k_cache, window, cap, sinks, plan.batch_invariant, plan.q_len)
    if out is None:
        out = q.new_empty(q.shape, dtype=checks.out_dtype(q))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    if q.shape[0]:
        _op(
            q, k_cache, v_cache, page_table, plan.map, plan.workspace, out, lse, q_scale, k_tensor, v_tensor, sinks,
            k_factor, v_factor, scale, cap, plan.q_len, window, plan.num_ctas, plan.max_batch, plan.max_seq_len,
            plan.batch_invariant,
        )  # fmt: skip
    return out if lse is None else (out, lse)


def _check_plan(plan: DecodePlan, q: torch.Tensor, k_cache: torch.Tensor) -> None:
    """ValueError unless the plan was made for these tensors and updated for their batch."""
    if not isinstance(plan, DecodePlan):
        fail(_WHERE, "plan", "a DecodePlan", type(plan).__name__, TypeError)
    have = (q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1])
    names = ("num_q_heads", "num_kv_heads", "head_dim", "page_size")
    for name, got in zip(names, have, strict=True):
        if getattr(plan, name) != got:
            fail(_WHERE, "plan", f"one made for {name}={got} (q and k_cache)", f"{name}={getattr(plan, name)}")
    if plan.kv_dtype != k_cache.dtype:
        fail(_WHERE, "plan", f"one made for kv_dtype={k_cache.dtype} (k_cache's)", f"kv_dtype={plan.kv_dtype}")
    if plan.device != q.device:
        fail(_WHERE, "plan", f"one made for device {q.device} (the device of q)", f"device {plan.device}")
    if q.shape[0] != plan.batch * plan.q_len:
        made_for = f"plan was made for q_len={plan.q_len} and updated with {plan.batch} requests"
        fail(_WHERE, "q", f"{plan.batch * plan.q_len} rows ({made_for})", f"{q.shape[0]} ({list(q.shape)})")


def _check_device(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    batch_invariant: bool,
    q_len: int,
) -> None:
    rows = q_len * (q.shape[1] // k_cache.shape[2])
    used = features(
        "decode", q.dtype, k_cache.dtype, q.shape[2], rows, window > 0, softcap > 0, sinks is not None, batch_invariant
    )
    checks.check_device(_WHERE, "decode", used, q.device)


def _check_values(page_table: torch.Tensor, k_cache: torch.Tensor, plan_map: torch.Tensor) -> DecodeSchedule:
    """Lengths and page ids, from host copies; returns the map."""
    schedule = _cpu.read_map(plan_map.cpu())
    pages, page_size = k_cache.shape[:2]
    lengths = schedule.requests["seq_len"][:-1].tolist()
    checks.check_lengths(_WHERE, lengths, page_size, page_table.shape[1])
    visible = [(0, length) for length in lengths]
    if schedule.window:
        seen = schedule.window + schedule.q_len - 1  # keys that the rows of a request see between them
        visible = [(max(0, length - seen), length) for length in lengths]
    checks.check_page_ids(_WHERE, page_table.cpu(), visible, page_size, pages)
    return schedule


def _decode_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan_map: torch.Tensor,
    workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_factor: float,
    v_factor: float,
    sm_scale: float,
    softcap: float,
    *_: object,
) -> None:
    checks.check_alignment(_WHERE, q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    schedule = _check_values(page_table, k_cache, plan_map)
    options = _cpu.Options(sm_scale * k_factor, k_scale, v_scale, v_factor, sinks, softcap)
    _cpu.decode(q, k_cache, v_cache, page_table, schedule, workspace, out, lse, q_scale, options)


def _decode_cuda(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan_map: torch.Tensor,
    workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_factor: float,
    v_factor: float,
    sm_scale: float,
    softcap: float,
    q_len: int,
    window: int,
    num_ctas: int,
    max_batch: int,
    max_seq_len: int,
    batch_invariant: bool,
) -> None:
    _check_device(q, k_cache, window, softcap, sinks, batch_invariant, q_len)
    checks.check_alignment(_WHERE, q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    if checks.debug_values():
        _check_values(page_table, k_cache, plan_map)
    _cuda.decode(
        q, k_cache, v_cache, page_table, plan_map, workspace, out, lse, q_scale, k_scale, v_scale, sinks, k_factor,
        v_factor, sm_scale, softcap, q_len, window, num_ctas, max_batch, max_seq_len, batch_invariant,
    )  # fmt: skip


_op = register("decode", _SCHEMA, _decode_cpu, _decode_cuda)
