"""One MoE layer's tensors for the demo: a real model's shape, real request lengths, synthetic values from a seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hpc_common.poison import PagedCache, paged_cache

from .errors import InputError

FP8 = torch.float8_e4m3fn
# Cached tokens of one demo batch: 1 GB of e4m3 cache, and as float64 reference one request at a time.
MAX_TOKENS = 4 * 1_048_576


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer on one rank; attention over an e4m3 cache, experts in block FP8."""

    name: str
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_experts: int
    top_k: int
    intermediate: int

    @property
    def group(self) -> int:
        """Elements of I that share a scale: 128, or 64 where tensor parallelism cut a 128 grid."""
        return 128 if self.intermediate % 128 == 0 else 64

    def describe(self) -> tuple[str, str]:
        """The sizes, in a line for attention and one for router and experts."""
        heads = f"{self.num_q_heads} query heads on {self.num_kv_heads} KV head{'s' * (self.num_kv_heads > 1)}"
        return (
            f"{heads} of {self.head_dim}, e4m3 cache in pages of {self.page_size}",
            f"hidden {self.hidden}, {self.num_experts} block-FP8 experts of {self.intermediate}, top {self.top_k}",
        )


# 32 query and 4 KV heads, intermediate size 768, cut over 4 ranks: each holds an 8/1 slice and 192 of 768.
QWEN3_30B_TP4 = LayerShape("Qwen3-30B-A3B, one of 4 tensor-parallel ranks", 2048, 8, 1, 128, 64, 128, 8, 192)


def random_e4m3(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """e4m3 values of either sign with magnitudes from 0.125 to 1.875, uniform over the 64 such numbers.

    Made from random bytes with the upper exponent bits fixed: for the 10^8 weights of a layer several times faster
    than rounding normal deviates.
    """
    count = 1
    for size in shape:
        count *= size
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=generator)
    values = words.view(torch.uint8)[:count]
    values.bitwise_and_(0x9F).bitwise_or_(0x20)  # sign and exponent bits 01xx: 2^-3 to 2^0
    return values.view(FP8).view(tuple(shape))


def _block_scales(shape: Sequence[int], rms: float, generator: torch.Generator) -> torch.Tensor:
    """fp32 scales that make a product's rms about ``rms``; they differ by powers of 4, so mixing them up shows."""
    steps = torch.randint(-1, 2, tuple(shape), generator=generator)
    return (rms * 0.45 * torch.pow(4.0, steps.to(torch.float32))).contiguous()


@dataclass
class Layer:
    """A layer's weights, caches and inputs, on one device.

    cache: K and V e4m3 [pages, page_size, Hkv, D] in random page order, NaN in every slot that holds no token. q [B,
    Hq, D] and residual [B, H] bf16. w_o [H, Hq * D] and norm [H]: the dense part between attention and router, bf16.
    router [E, H] fp32. w13 [E, 2I, H] and w2 [E, H, I] e4m3 with their scales fp32.
    """

    shape: LayerShape
    lengths: list[int]
    cache: PagedCache
    k_scale: float
    v_scale: float
    q: torch.Tensor
    residual: torch.Tensor
    w_o: torch.Tensor
    norm: torch.Tensor
    router: torch.Tensor
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor

    def hidden_states(self, attention: torch.Tensor) -> torch.Tensor:
        """Attention's output [B, Hq, D] to what router and experts read, bf16 [B, H]: projection, residual, RMSNorm.

        Plain torch in float32 with the output rounded once; none of this project's operators.
        """
        flat = attention.to(torch.float32).flatten(1)
        hidden = self.residual.to(flat) + flat @ self.w_o.to(flat).T
        normed = hidden * torch.rsqrt(hidden.square().mean(1, keepdim=True) + 1e-6)
        return (normed * self.norm.to(flat)).to(torch.bfloat16)


def make_layer(
    shape: LayerShape, lengths: Sequence[int], seed: int, progress: Callable[[int], None] = lambda tokens: None
) -> Layer:
    """A layer of ``shape`` with a cache of the given lengths; the same for the same seed.

    progress: called with the number of cached tokens that were just made. Raises InputError above 4,194,304 tokens.
    """
    if sum(lengths) > MAX_TOKENS:
        raise InputError(f"the demo's batch holds at most {MAX_TOKENS:,} cached tokens, got {sum(lengths):,}")
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    keys, values = [], []
    for length in lengths:
        for side in (keys, values):
            side.append(random_e4m3((length, shape.num_kv_heads, shape.head_dim), generator))
        progress(length)
    experts, hidden, inner, group = shape.num_experts, shape.hidden, shape.intermediate, shape.group
    width = shape.num_q_heads * shape.head_dim
    batch = len(lengths)
    return Layer(
        shape=shape,
        lengths=list(lengths),
        cache=paged_cache(keys, values, shape.page_size, seed=seed),
        k_scale=0.5,
        v_scale=2.0,
        # Scores of standard deviation 2: some tokens matter more than others, none alone decides.
        q=(4.6 * normal(batch, shape.num_q_heads, shape.head_dim)).to(torch.bfloat16),
        residual=normal(batch, hidden).to(torch.bfloat16),
        w_o=(normal(hidden, width) * width**-0.5).to(torch.bfloat16),
        norm=(1 + 0.1 * normal(hidden)).to(torch.bfloat16),
        router=normal(experts, hidden) * hidden**-0.5,
        w13=random_e4m3((experts, 2 * inner, hidden), generator),
        w13_scale=_block_scales((experts, 2 * inner // group, hidden // 128), hidden**-0.5, generator),
        w2=random_e4m3((experts, hidden, inner), generator),
        w2_scale=_block_scales((experts, hidden // 128, inner // group), inner**-0.5, generator),
    )
