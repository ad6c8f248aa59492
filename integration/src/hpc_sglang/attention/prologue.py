"""What comes before a layer's decode attention, in one kernel: Q/K norm, rotation, and K and V into the cache.

SGLang launches a norm and a rotation that also stores bf16 keys and values; for an FP8 cache the store is four more
kernels. Only a decode step of this package's backend goes this way, so an attention module gets a method of its own
(``install``) that goes back to the model's for anything else. On a CPU the same is done with torch.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import compat
from ..counters import count
from ..early import early_start

MODULES = ("Qwen3MoeAttention",)  # of sglang.srt.models; they have apply_qk_norm_rope(qkv, positions, forward_batch)
_HEADS = 4  # of a program, one a warp


class Prologue:
    """In place of one attention module's ``apply_qk_norm_rope``.

    Keys and values that it returns are None: the backend then stores nothing.
    """

    def __init__(self, module: Any, backend: Any, original: Callable[..., Any]) -> None:
        self.module, self.backend, self.original = module, backend, original

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> tuple[Any, Any, Any]:
        module = self.module
        scales = self._scales()
        ours = forward_batch.forward_mode.is_decode() and not torch.compiler.is_compiling()
        if not ours or scales is None or qkv.stride(1) != 1 or positions.dim() != 1:
            return self.original(qkv, positions, forward_batch)
        count("attention.prologue")
        k_cache, v_cache = self.backend.token_to_kv_pool.get_kv_buffer(module.attn.layer_id)
        run(
            qkv, module.q_norm.weight, module.k_norm.weight, module.q_norm.variance_epsilon,
            module.k_norm.variance_epsilon, module.rotary_emb.cos_sin_cache, positions, forward_batch.out_cache_loc,
            k_cache, v_cache, *scales,
        )  # fmt: skip
        module._used_fused_qk_norm_rope_last_call = False  # read behind this method
        return qkv[:, : module.q_size], None, None

    def _scales(self) -> tuple[float, float] | None:
        """What SGLang divides an FP8 cache's keys and values by; None where only tensors say it."""
        layer = self.module.attn
        pairs = ((layer.k_scale_float, layer.k_scale), (layer.v_scale_float, layer.v_scale))
        if any(number is None and tensor is not None for number, tensor in pairs):
            return None
        k, v = (1.0 if number is None else float(number) for number, _ in pairs)
        return k, v


def install(model: torch.nn.Module, backend: Any) -> int:
    """Have every attention module of ``model`` that is known here go this way; how many there are."""
    placed = 0
    for module in model.modules():
        known = any(base.__name__ in MODULES for base in type(module).__mro__)
        if known and type(module).__module__.startswith("sglang.srt.models.") and _fits(module, backend):
            original = module.apply_qk_norm_rope
            if isinstance(original, Prologue):  # of a backend that this one replaces
                original = original.original
            module.apply_qk_norm_rope = Prologue(module, backend, original)
            placed += 1
    return placed


def _fits(module: Any, backend: Any) -> bool:
    """Whether ``run`` does what this module's norms and rotation and this backend's pool do."""
    rope, dim = module.rotary_emb, module.head_dim
    base = compat.find("sglang.srt.layers.rotary_embedding:RotaryEmbedding")
    plain = isinstance(rope, base) and type(rope).forward_cuda is base.forward_cuda and not rope.use_fallback_kernel
    return bool(
        plain
        and rope.is_neox_style
        and rope.head_size == rope.rotary_dim == dim
        and dim & (dim - 1) == 0
        and not getattr(module, "use_fused_qk_norm_rope", False)  # --enable-fused-qk-norm-rope asks for SGLang's
        and module.q_norm.weight.dtype == module.k_norm.weight.dtype == backend.server.dtype
        and backend.window_pool is None
        and backend.token_to_kv_pool.get_kv_buffer(module.attn.layer_id)[0].dim() == 3
    )


def run(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_epsilon: float,
    k_epsilon: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    kernel: bool | None = None,
) -> None:
    """Norm and rotate query heads in place, and write normed and rotated keys, and values, into the cache.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D] bf16 or fp16, dense rows: query, key and value heads.
        q_weight, k_weight: [D] of the RMS norms over each head; q_epsilon, k_epsilon: what they add to mean squares.
        cos_sin: [positions, D], cosines of the D / 2 angles, then sines; a head's halves are rotated (NeoX).
        positions, slots: [T] integers, rows of cos_sin and of the caches.
        k_cache, v_cache: [slots, Hkv, D], dense slots; qkv's dtype, or FP8 of values divided by k_scale and v_scale.
        kernel: whether the kernel does it, else torch; default: on a GPU (Triton's interpreter runs it on a CPU).
    """
    tokens, kv_heads, dim = len(qkv), *k_cache.shape[1:]
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    if qkv.is_cuda if kernel is None else kernel:
        if not tokens:
            return
        pdl = early_start(qkv.device)
        _get_kernel()[(tokens, -(-q_heads // _HEADS) - (-kv_heads // _HEADS))](
            qkv, q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache, qkv.stride(0), cos_sin.stride(0),
            k_cache.stride(0), v_cache.stride(0), q_epsilon, k_epsilon, k_scale, v_scale,
            Q_HEADS=q_heads, KV_HEADS=kv_heads, HALF=dim // 2, HEADS=_HEADS, PDL=pdl,
            num_warps=4, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
        return
    heads = qkv.view(tokens, -1, dim)
    cos, sin = cos_sin.float()[positions.long()][:, None].chunk(2, -1)
    made = []
    for part, weight, epsilon in (
        (heads[:, :q_heads], q_weight, q_epsilon),
        (heads[:, q_heads : q_heads + kv_heads], k_weight, k_epsilon),
    ):
        x = part.float()
        x = (x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.float()).to(qkv.dtype).float()
        low, high = x.chunk(2, -1)
        made.append(torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(qkv.dtype))
    heads[:, :q_heads] = made[0]
    k_cache[slots.long()] = (made[1] / k_scale).to(k_cache.dtype)
    v_cache[slots.long()] = (heads[:, q_heads + kv_heads :] / v_scale).to(v_cache.dtype)


@functools.cache
def _get_kernel():  # noqa: ANN202, a triton kernel
    from ._prologue_kernel import norm_rotate_store

    return norm_rotate_store
