"""What this package supports: one table that the checks, the tests and the README are made from.

A row that says ``cuda=True`` has a kernel; a problem runs on a device where every feature it uses does.
"""

import torch
from hpc_common.capability import Support, as_device
from hpc_common.capability import why_not as _row_why_not
from hpc_common.checks import check_int, fail

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 32, 64, 128, 256)
MAX_Q_LEN = 8
MAX_RATIO = 16  # query heads a KV head
MAX_KV_HEADS = 128
MAX_BATCH = 4096
MAX_SEQ_LEN = 1_048_576
DTYPES_16 = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn

_SIXTEEN, _FP8_CACHE, _FP8_BOTH = "16-bit query and cache", "16-bit query, e4m3 cache", "e4m3 query and cache"
_FEW_ROWS, _MORE_ROWS = "up to 32 query rows a KV head", "33 to 128 query rows a KV head"
_NONE_YET = "no GPU kernel yet; CPU tensors run"
_WHERE = "hpc_attention.is_supported"

SUPPORT: tuple[Support, ...] = (
    Support("DecodePlan.update", f"up to {MAX_BATCH:,} requests", cuda=True),
    Support("decode", _SIXTEEN, cuda=True),
    Support("decode", _FP8_CACHE, cuda=True),
    Support("decode", _FP8_BOTH, cuda=True),
    *(Support("decode", f"head_dim {dim}", cuda=True) for dim in HEAD_DIMS),
    Support("decode", _FEW_ROWS, cuda=True),
    Support("decode", _MORE_ROWS, cuda=True),
    Support("decode", "window", cuda=True),
    Support("decode", "softcap", cuda=True),
    Support("decode", "sinks", cuda=True),
    Support("decode", "batch_invariant", cuda=True),
    Support("prefill", _SIXTEEN, note=_NONE_YET),
    Support("prefill", _FP8_CACHE, note=_NONE_YET),
)


def limit_error(
    *,
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    page_size: int,
    q_len: int = 1,
    window: int | None = None,
) -> tuple[str, str, str] | None:
    """The first limit of decode and prefill that these sizes break: (argument, expected, got); None where they fit."""
    if head_dim not in HEAD_DIMS:
        return "head_dim", f"one of {HEAD_DIMS}", str(head_dim)
    if not 1 <= num_kv_heads <= MAX_KV_HEADS:
        return "num_kv_heads", f"1 to {MAX_KV_HEADS}", str(num_kv_heads)
    if num_q_heads < 1 or num_q_heads % num_kv_heads or num_q_heads // num_kv_heads > MAX_RATIO:
        return "num_q_heads", f"1 to {MAX_RATIO} times num_kv_heads ({num_kv_heads}), a whole ratio", str(num_q_heads)
    if page_size not in PAGE_SIZES:
        return "page_size", f"one of {PAGE_SIZES}", str(page_size)
    if not 1 <= q_len <= MAX_Q_LEN:
        return "q_len", f"1 to {MAX_Q_LEN}", str(q_len)
    if window is not None and window < 1:
        return "window", "None or at least 1 (keys a row sees, itself included)", str(window)
    return None


def dtype_error(q_dtype: torch.dtype, kv_dtype: torch.dtype, operator: str = "decode") -> tuple[str, str, str] | None:
    """The dtype that the operator doesn't take: (argument, expected, got); None where it takes both."""
    allowed = (*DTYPES_16, FP8) if operator == "decode" else DTYPES_16
    if q_dtype not in allowed:
        return "q", " or ".join(map(str, allowed)), str(q_dtype)
    if kv_dtype != FP8 and (kv_dtype != q_dtype or q_dtype == FP8):
        expected = str(FP8) if q_dtype == FP8 else f"{q_dtype} (the query's) or {FP8}"
        return "k_cache", expected, str(kv_dtype)
    return None


def features(
    operator: str,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    rows: int,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    batch_invariant: bool = False,
) -> tuple[str, ...]:
    """The table rows that a problem uses; ``rows`` is q_len times query heads a KV head."""
    kind = _FP8_BOTH if q_dtype == FP8 else _FP8_CACHE if kv_dtype == FP8 else _SIXTEEN
    if operator != "decode":
        return (kind,)
    used = [kind, f"head_dim {head_dim}", _FEW_ROWS if rows <= 32 else _MORE_ROWS]
    options = {"window": window, "softcap": softcap, "sinks": sinks, "batch_invariant": batch_invariant}
    return (*used, *(name for name, wanted in options.items() if wanted))


def device_refusal(operator: str, used: tuple[str, ...], device: torch.device) -> str:
    """Why ``operator`` with all of the features ``used`` does not run on ``device``; "" where it does."""
    if device.type not in ("cpu", "cuda"):
        return f"{device} is neither a CPU nor a CUDA device"
    for feature in used:
        reason = _row_why_not(SUPPORT, operator, feature, device)
        if reason:
            return f"{feature}: {reason}"
    return ""


def why_not(
    *,
    operator: str = "decode",
    q_dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    head_dim: int = 128,
    num_q_heads: int = 8,
    num_kv_heads: int = 1,
    page_size: int = 64,
    q_len: int = 1,
    window: int | None = None,
    softcap: bool = False,
    sinks: bool = False,
    batch_invariant: bool = False,
    device: torch.device | str | None = None,
) -> str:
    """Why a problem is not supported, in one line; "" where it is.

    Args:
        operator: "decode" or "prefill" (which takes no e4m3 query and ignores q_len and batch_invariant).
        q_dtype, kv_dtype: of the query and of the cache (default: the query's).
        head_dim, num_q_heads, num_kv_heads, page_size, q_len, window: as in DecodePlan.
        softcap, sinks, batch_invariant: whether the option is used.
        device: where the tensors lie; default the current GPU where there is one, else the CPU.

    Raises TypeError for an argument of a wrong type, ValueError for an unknown operator or a string that names no
    device. A device that is not there, or that runs nothing (meta), is a reason.
    """
    if not isinstance(operator, str) or operator not in ("decode", "prefill"):
        fail(_WHERE, "operator", "decode or prefill", repr(operator))
    for name, dtype in (("q_dtype", q_dtype), ("kv_dtype", kv_dtype)):
        if not isinstance(dtype, torch.dtype) and (name == "q_dtype" or dtype is not None):
            fail(_WHERE, name, "a torch.dtype", f"{type(dtype).__name__} {dtype!r}", TypeError)
    sizes = dict(
        head_dim=head_dim, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, page_size=page_size, q_len=q_len
    )
    for name, value in (*sizes.items(), *((("window", window),) if window is not None else ())):
        check_int(_WHERE, name, value, -(1 << 63), (1 << 63) - 1)  # the type; the ranges are limit_error's
    where = as_device(_WHERE, device)
    kv_dtype = q_dtype if kv_dtype is None else kv_dtype
    broken = dtype_error(q_dtype, kv_dtype, operator) or limit_error(
        head_dim=head_dim,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        q_len=q_len if operator == "decode" else 1,
        window=window,
    )
    if broken:
        return "{}: expected {}, got {}".format(*broken)
    rows = q_len * (num_q_heads // num_kv_heads)
    used = features(operator, q_dtype, kv_dtype, head_dim, rows, window is not None, softcap, sinks, batch_invariant)
    return device_refusal(operator, used, where)


def is_supported(**problem: object) -> bool:
    """Whether a problem runs; keyword arguments as in ``why_not``, which also says why not."""
    return not why_not(**problem)  # type: ignore[arg-type]
