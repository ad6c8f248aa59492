"""Decode on a Hopper GPU: tensors as addresses and strides for the kernels of ``_C``."""

import torch

from . import _C
from .support import FP8, MAX_SEQ_LEN

# As in csrc: kinds of cache and of query.
_KIND = {torch.bfloat16: 0, torch.float16: 1, FP8: 2}
_NONE = (0, 0)  # strides of what is not given

# Addresses of the maps that were updated and not yet read by a decode. Kept beside the plans, and looked up when the
# operator runs, so that a compiled call does not depend on it. An entry too many only costs an early start.
_updated_maps: set[int] = set()


def map_updated(plan_map: torch.Tensor) -> None:
    """To be called when the plan kernel has been launched: the next decode waits before it reads the map."""
    _updated_maps.add(plan_map.data_ptr())


def ctas_per_sm(device: torch.device, kv_dtype: torch.dtype, head_dim: int, rows: int) -> int:
    """CTAs of the attention kernel on one SM of ``device`` that a plan should count on.

    They are resident together, so that no CTA waits for another to end. rows: query rows of one KV head.
    """
    return _C.decode_ctas_per_sm(device.index, _KIND[kv_dtype], head_dim, rows)


def cluster_ctas(
    device: torch.device, kv_dtype: torch.dtype, head_dim: int, rows: int, num_kv_heads: int, max_seq_len: int
) -> int:
    """CTAs of a plan for one request: a cluster a KV head, which adds its pieces itself; 0 where it has none.

    rows: query rows of one KV head.
    """
    return _C.decode_cluster_ctas(device.index, _KIND[kv_dtype], head_dim, rows, num_kv_heads, max_seq_len)


def _strides(tensor: torch.Tensor, *dims: int) -> tuple[int, ...]:
    """(address, strides of ``dims``); 0 for a dimension of one entry, whose stride torch leaves open."""
    return tensor.data_ptr(), *(tensor.stride(dim) if tensor.shape[dim] > 1 else 0 for dim in dims)


def _rows(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """(address, token stride, head stride) of [tokens, heads, ...]."""
    return (0, *_NONE) if tensor is None else _strides(tensor, 0, 1)


def _key_scale(scale: torch.Tensor | None) -> tuple[int, ...]:
    """(address, page stride, token stride, head stride) of [1], [Hkv] or [pages, page_size, Hkv]."""
    if scale is None:
        return 0, *_NONE, 0
    if scale.dim() == 3:
        return _strides(scale, 0, 1, 2)
    address, stride = _strides(scale, 0)
    return address, *_NONE, stride


def decode(
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
    stages: int = 0,
    combine_ctas: int = 0,
    early_slices: int = -1,
) -> None:
    """Launch the attention and the combine kernel on the current stream; arguments as of ``hpc_attention::decode``.

    Inside a capture, every decode but the first after an update reads the plan, page ids and the tokens before this
    step's while the kernel before it in the stream still runs, and where that one lets its successor go before it waits
    itself (as decode's kernels do), those before it, too. They may write this step's tokens, not older ones. Outside
    of captures, and in the first decode, everything is read behind them.

    stages, combine_ctas, early_slices: for measurements. Slices in flight a warp, and grid of the second kernel
    (negative: left out), 0 for the defaults; slices a warp asks for before the kernel waits, -1 for the default.
    """
    device = q.device
    num_pages, page_size, num_kv_heads, head_dim = k_cache.shape
    window = min(window, MAX_SEQ_LEN)
    early = plan_map.data_ptr() not in _updated_maps and torch.cuda.is_current_stream_capturing()
    _updated_maps.discard(plan_map.data_ptr())
    _C.decode(
        device.index, torch.cuda.current_stream(device).cuda_stream, _KIND[k_cache.dtype], _KIND[q.dtype],
        q.shape[0] // q_len, head_dim, q.shape[1], num_kv_heads, page_size, num_pages, page_table.shape[1], q_len,
        window, num_ctas, max_batch, batch_invariant, max_seq_len, _rows(q), _rows(q_scale),
        _strides(k_cache, 0, 1, 2), _strides(v_cache, 0, 1, 2), _strides(page_table, 0), _key_scale(k_scale),
        k_scale is not None and k_scale.dim() == 3, (0, 0) if v_scale is None else _strides(v_scale, 0),
        0 if sinks is None else sinks.data_ptr(), _rows(out), _rows(lse), plan_map.data_ptr(), plan_map.numel(),
        workspace.data_ptr(), workspace.numel() * workspace.element_size(), sm_scale * k_factor, v_factor, softcap,
        early, stages, combine_ctas, early_slices,
    )  # fmt: skip
