"""Decode problems for tests and benchmarks: inputs, plan, float64 result and the error that rounding may cause.

Not imported by the package itself; it needs pytest only for ``devices`` and ``on_devices``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from hpc_common.poison import PagedCache, paged_cache
from hpc_common.reference import attention as reference

from .decode import decode
from .plan import DecodePlan
from .support import FP8, SUPPORT, features

# Largest relative error of one rounding to nearest: half a unit in the last of 8 (bf16) or 11 (fp16) bits.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Problem:
    """A decode problem by its sizes; everything else is drawn from ``seed``.

    k_scale: None, "float", "one" ([1]), "head" ([Hkv]) or "token" ([pages, page_size, Hkv]); v_scale the first four.
    Scales of neighbouring heads differ by a factor of two or more, so that a wrong one shows.
    """

    lengths: tuple[int, ...] = (70,)
    num_q_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 128
    page_size: int = 64
    q_len: int = 1
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: the query's
    layout: str = "NHD"
    window: int | None = None
    batch_invariant: bool = False
    softcap: float | None = None
    sinks: bool = False
    sm_scale: float | None = None
    k_scale: str | None = None
    v_scale: str | None = None
    num_ctas: int | None = None
    max_batch: int | None = None
    max_seq_len: int | None = None
    seed: int = 0

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.q_dtype

    def features(self) -> tuple[str, ...]:
        """The rows of the support table that this problem uses."""
        rows = self.q_len * (self.num_q_heads // self.num_kv_heads)
        return features(
            "decode", self.q_dtype, self.cache_dtype, self.head_dim, rows, self.window is not None,
            self.softcap is not None, self.sinks, self.batch_invariant,
        )  # fmt: skip

    def make(self, device: torch.device | str = "cpu") -> "Inputs":
        """Draw the inputs (the same numbers on every device), and plan."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        heads, dim = self.num_kv_heads, self.head_dim
        keys = [normal(n, heads, dim).to(self.cache_dtype) for n in self.lengths]
        values = [normal(n, heads, dim).to(self.cache_dtype) for n in self.lengths]
        cache = paged_cache(keys, values, self.page_size, self.layout, seed=self.seed, device=device)
        tokens = len(self.lengths) * self.q_len
        q = normal(tokens, self.num_q_heads, dim).to(self.q_dtype).to(device)
        options: dict[str, Any] = {"sm_scale": self.sm_scale, "softcap": self.softcap}
        if self.q_dtype == FP8:
            options["q_scale"] = (0.5 + torch.rand(tokens, self.num_q_heads, generator=generator)).to(device)
        if self.sinks:
            options["sinks"] = normal(self.num_q_heads).to(device)
        steps = 2.0 ** (torch.arange(heads) % 3 - 1)  # 0.5, 1, 2, 0.5, ...
        if self.k_scale == "token":
            per_token = [(0.75 + 0.5 * torch.rand(n, heads, generator=generator)) * steps for n in self.lengths]
            options["k_scale"] = cache.scatter(per_token)
        elif self.k_scale:
            options["k_scale"] = {"float": 0.75, "one": torch.tensor([0.75]), "head": 0.75 * steps}[self.k_scale]
        if self.v_scale:
            options["v_scale"] = {"float": 1.25, "one": torch.tensor([1.25]), "head": 1.25 * steps}[self.v_scale]
        options = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
        plan = DecodePlan(
            max_batch=self.max_batch or max(len(self.lengths), 1), num_q_heads=self.num_q_heads, num_kv_heads=heads,
            head_dim=dim, page_size=self.page_size, q_len=self.q_len, window=self.window, kv_dtype=self.cache_dtype,
            device=device, batch_invariant=self.batch_invariant, num_ctas=self.num_ctas,
            max_seq_len=self.max_seq_len or (max(self.lengths, default=1) or 1 if self.batch_invariant else None),
        )  # fmt: skip
        plan.update(cache.seq_lens)
        return Inputs(self, q, cache, keys, values, plan, options)


@dataclass
class Inputs:
    """A problem's tensors on one device. keys, values: the dense [L_b, Hkv, D] tensors that the cache was made from."""

    problem: Problem
    q: torch.Tensor
    cache: PagedCache
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    plan: DecodePlan
    options: dict[str, Any]
    _reference: tuple[torch.Tensor, ...] | None = field(default=None, repr=False)

    def run(self, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``decode`` of these inputs: (out, lse). ``changes`` replaces arguments by name."""
        cache = self.cache
        named = dict(
            q=self.q, k_cache=cache.k_cache, v_cache=cache.v_cache, page_table=cache.page_table, plan=self.plan
        )
        return decode(**{**named, **self.options, "return_lse": True, **changes})

    def reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Float64 (out, lse, spread) on the CPU; ``spread`` is the same average of the values' magnitudes.

        An error of the softmax's weights of relative size e changes an output by at most e times its spread.
        """
        if self._reference is None:
            cache, options = self.cache, {**self.options, "window": self.problem.window}
            table, lengths, q_len = cache.page_table, cache.seq_lens, self.problem.q_len
            out, lse = reference.decode(self.q, cache.k_cache, cache.v_cache, table, lengths, q_len, **options)
            magnitudes = cache.v_cache.to(torch.float32).abs()
            spread, _ = reference.decode(self.q, cache.k_cache, magnitudes, table, lengths, q_len, **options)
            self._reference = out, lse, spread
        return self._reference

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None, kernel: bool | None = None) -> None:
        """AssertionError where a result differs from the reference by more than rounding explains.

        Each output: the rounding to its dtype, plus what the arithmetic before it does to the weights, times the
        spread. On a CPU all of that is fp32: a score of size 16 is known to 2^-20 per rounding, and its sum of
        head_dim products, exp and the division stay within four of those, 2^-18 of a weight. The kernels round the
        weights once to the cache's 16-bit type, or to fp16 for an e4m3 cache. All outputs together: a rounding's error
        is uniform, so its RMS is at most the largest over sqrt(3).

        kernel: whether a kernel made the result; None: it did where the result lies on a GPU.
        """
        want, want_lse, spread = self.reference()
        have = out.detach().cpu().to(torch.float64)
        rounding = ROUNDING[out.dtype]
        weights = 2.0**-18
        if out.is_cuda if kernel is None else kernel:
            weights += ROUNDING[torch.float16 if self.problem.cache_dtype == FP8 else self.problem.cache_dtype]
        bound = rounding * want.abs() + weights * spread + 2.0**-25  # the last: fp16's subnormals
        excess = (have - want).abs() - bound
        assert bool((excess <= 0).all()), f"out: {float(excess.nan_to_num(float('inf')).max()):.3g} beyond the bound"
        rms = (have - want).square().mean().sqrt()
        limit = (rounding * want.square().mean().sqrt() + weights * spread.square().mean().sqrt()) / 3**0.5
        assert out.numel() == 0 or rms <= limit + 2.0**-25, f"out: RMS error {rms:.3g} above {limit:.3g}"
        if lse is not None:
            near = 2.0**-20 * (8 + want_lse.abs().nan_to_num(posinf=0.0))
            have_lse = lse.detach().cpu().to(torch.float64)
            same = (have_lse == want_lse) | ((have_lse - want_lse).abs() <= near)
            assert bool(same.all()), f"lse: {have_lse[~same][0]:.9g} for {want_lse[~same][0]:.9g}"


def decode_by(inputs: Inputs, plan: DecodePlan, out: torch.Tensor | None = None) -> torch.Tensor:
    """``decode`` of the inputs, without lse, by a plan that need not be theirs."""
    cache = inputs.cache
    return decode(inputs.q, cache.k_cache, cache.v_cache, cache.page_table, plan, out=out, **inputs.options)


def capture_step(layers: list[Inputs], outs: list[torch.Tensor]) -> torch.cuda.CUDAGraph:
    """A captured step: the first layer's plan updated, then all layers by it, ten times over, each to its ``out``.

    A replay follows what the first layer's ``seq_lens`` hold then.
    """
    plan, lengths = layers[0].plan, layers[0].cache.seq_lens

    def step() -> None:
        plan.update(lengths)
        for _ in range(10):
            for layer, out in zip(layers, outs, strict=True):
                decode_by(layer, plan, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def devices(*problems: Problem) -> list[Any]:
    """pytest parameters "cpu" and, where the support table has kernels for all of these problems, "cuda"."""
    from hpc_common.testing import device_params

    used = {name for problem in problems for name in problem.features()}
    return device_params(SUPPORT, "decode", *sorted(used))


def on_devices(problems: Iterable[Problem]) -> list[Any]:
    """pytest parameters (problem, device): every problem on each device that the support table has it for."""
    import pytest

    params = []
    for problem in problems:
        for device in devices(problem):
            plain = isinstance(device, str)
            params.append(
                pytest.param(problem, device) if plain else pytest.param(problem, *device.values, marks=device.marks)
            )
    return params
