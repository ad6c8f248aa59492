"""What comes before a layer's decode attention in one kernel: values, and which calls it takes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hpc_sglang.attention import prologue
from hpc_sglang.counters import calls

SLOTS, POSITIONS = 40, 100


def problem(tokens: int, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> list[Any]:
    """Arguments of ``prologue.run``, rows of qkv further apart than they are long, slots and positions in no order."""
    source = torch.Generator().manual_seed(0)
    width = (q_heads + 2 * kv_heads) * dim
    qkv = torch.randn((tokens, width + 16), generator=source).to(dtype)[:, :width]
    weights = [(0.5 + torch.rand(dim, generator=source)).to(dtype) for _ in range(2)]
    cos_sin = 2 * torch.rand((POSITIONS, dim), generator=source) - 1
    positions = torch.randint(POSITIONS, (tokens,), generator=source)
    slots = torch.randperm(SLOTS, generator=source)[:tokens]
    caches = [torch.zeros(SLOTS, kv_heads, dim).to(kv_dtype) for _ in range(2)]
    return [qkv, *weights, 1e-6, 1e-2, cos_sin, positions, slots, *caches]


def expected(given: list[Any], k_scale: float, v_scale: float) -> list[torch.Tensor]:
    """Query rows, keys and values of each token in float64, from the formulas one head at a time."""
    qkv, q_weight, k_weight, q_epsilon, k_epsilon, cos_sin, positions, slots, k_cache, _ = given
    kv_heads, dim = k_cache.shape[1:]
    made: list[list[torch.Tensor]] = [[], [], []]
    for token, row in enumerate(qkv.double()):
        heads = list(row.split(dim))
        queries = len(heads) - 2 * kv_heads
        cos, sin = cos_sin[positions[token]].double().split(dim // 2)
        turn = torch.complex(cos, sin)
        for number, head in enumerate(heads[: queries + kv_heads]):
            weight, epsilon = (q_weight, q_epsilon) if number < queries else (k_weight, k_epsilon)
            normed = head / (head.square().mean() + epsilon).sqrt() * weight.double()
            turned = torch.complex(*normed.split(dim // 2)) * turn
            turned = torch.cat([turned.real, turned.imag])
            made[0 if number < queries else 1].append(turned if number < queries else turned / k_scale)
        made[2] += [head / v_scale for head in heads[queries + kv_heads :]]
    return [torch.stack(part).view(len(qkv), -1) for part in made]


def check(given: list[Any], want: list[torch.Tensor]) -> None:
    """Within what rounding before the rotation and after it makes of a pair of dims that turns together."""
    qkv, slots, k_cache, v_cache = (given[number].cpu() for number in (0, 7, 8, 9))
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[slots] = False
    half, queries = k_cache.shape[2] // 2, want[0].shape[1]
    for got, value in zip((qkv[:, :queries], k_cache[slots], v_cache[slots]), want, strict=True):
        step = 1.5 * torch.finfo(qkv.dtype).eps + (2.0**-4 if got.dtype == torch.float8_e4m3fn else 0)
        low, high = value.view(len(value), -1, 2, half).unbind(2)
        pair = torch.stack([low.hypot(high)] * 2, 2).view_as(value)
        off = (got.flatten(1).double() - value).abs()
        assert (off <= step * (pair + 0.02)).all(), (got.dtype, (off / (pair + 0.02)).max(), step)
    for cache in (k_cache, v_cache):
        assert not cache[untouched].float().any()


SHAPES = [(3, 8, 1, 128), (5, 6, 2, 64), (1, 10, 5, 256), (7, 32, 4, 128)]
KINDS = [
    (torch.bfloat16, torch.bfloat16, 1.0, 1.0),
    (torch.float16, torch.float16, 1.0, 1.0),
    (torch.bfloat16, torch.float8_e4m3fn, 0.5, 2.0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "kv_dtype", "k_scale", "v_scale"), KINDS, ids=["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values(
    device: str, dtype: torch.dtype, kv_dtype: torch.dtype, k_scale: float, v_scale: float, shape: tuple[int, ...]
) -> None:
    given = problem(*shape, dtype, kv_dtype)
    want = expected(given, k_scale, v_scale)
    kv = given[0][:, shape[1] * shape[3] :].clone()
    placed = [value.to(device) if isinstance(value, torch.Tensor) else value for value in given]
    prologue.run(*placed, k_scale, v_scale)
    check(placed, want)
    assert torch.equal(placed[0][:, shape[1] * shape[3] :].cpu(), kv)  # keys and values stay as they were


@pytest.mark.gpu
def test_a_captured_step_reads_its_inputs_anew() -> None:
    given = [value.cuda() if isinstance(value, torch.Tensor) else value for value in problem(*SHAPES[3], *KINDS[0][:2])]
    prologue.run(*given)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prologue.run(*given)
    other = problem(*SHAPES[3], *KINDS[0][:2])
    other[0].neg_()
    other[6], other[7] = other[6].flip(0), other[7].flip(0)
    want = expected(other, 1.0, 1.0)
    for number in (0, 6, 7):
        given[number].copy_(other[number])
    graph.replay()
    torch.cuda.synchronize()
    check(given, want)


INTERPRETED = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import test_sglang_prologue as tests
for shape in tests.SHAPES:
    given = tests.problem(*shape, torch.float16, torch.float16)
    want = tests.expected(given, 0.5, 2.0)
    tests.prologue.run(*given, 0.5, 2.0, kernel=True)
    tests.check(given, want)
print("checked")
"""


def test_kernel_values_in_tritons_interpreter(interpreted: Callable[[str], None]) -> None:
    """In fp16: the interpreter rounds to neither bf16 nor FP8 as a GPU does."""
    interpreted(INTERPRETED)


class Rope(torch.nn.Module):
    """SGLang's RotaryEmbedding as far as it is read."""

    head_size = rotary_dim = 64
    is_neox_style, use_fallback_kernel = True, False
    cos_sin_cache = 2 * torch.rand(POSITIONS, 64) - 1

    def forward_cuda(self) -> None:
        raise AssertionError


class OtherRope(Rope):
    def forward_cuda(self) -> None:
        raise AssertionError


def module_of(**changes: Any) -> torch.nn.Module:
    """One of SGLang's Qwen3MoeAttention modules as far as it is read; its own method says so."""

    class Qwen3MoeAttention(torch.nn.Module):
        def apply_qk_norm_rope(self, qkv: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> str:
            return "SGLang's"

    Qwen3MoeAttention.__module__ = "sglang.srt.models.qwen3_moe"
    module = Qwen3MoeAttention()
    norm = SimpleNamespace(weight=torch.ones(64, dtype=torch.bfloat16), variance_epsilon=1e-6)
    layer = SimpleNamespace(layer_id=3, k_scale=None, v_scale=None, k_scale_float=None, v_scale_float=None)
    settings = dict(
        rotary_emb=Rope(), head_dim=64, q_size=512, q_norm=norm, k_norm=norm, attn=layer, use_fused_qk_norm_rope=False,
        _used_fused_qk_norm_rope_last_call=True,
    )  # fmt: skip
    for name, value in {**settings, **changes}.items():
        setattr(module, name, value)
    return module


def backend_of(kv_dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    caches = tuple(torch.zeros(SLOTS, 2, 64).to(kv_dtype) for _ in range(2))
    pool = SimpleNamespace(get_kv_buffer=lambda layer: {3: caches}[layer])
    settings = dict(token_to_kv_pool=pool, window_pool=None, server=SimpleNamespace(dtype=torch.bfloat16))
    return SimpleNamespace(**{**settings, **changes})


@pytest.fixture
def ropes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prologue.compat, "find", lambda *paths: Rope)


def placed_in(module: torch.nn.Module, backend: Any) -> int:
    return prologue.install(torch.nn.Sequential(module, torch.nn.Linear(1, 1)), backend)


def batch_of(decode: bool, tokens: int = 4) -> Any:
    mode = SimpleNamespace(is_decode=lambda: decode)
    return SimpleNamespace(forward_mode=mode, out_cache_loc=torch.arange(tokens) + 7)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_a_decode_step_is_ours(kv_dtype: torch.dtype, ropes: None) -> None:
    module, backend = module_of(), backend_of(kv_dtype)
    assert placed_in(module, backend) == 1
    if kv_dtype != torch.bfloat16:
        module.attn.k_scale_float, module.attn.k_scale = 0.5, torch.tensor(0.5)
    given = problem(4, 8, 2, 64, torch.bfloat16, kv_dtype)
    norm, rope, caches = module.q_norm, module.rotary_emb, backend.token_to_kv_pool.get_kv_buffer(3)
    given[1:6] = [norm.weight, norm.weight, 1e-6, 1e-6, rope.cos_sin_cache]
    batch = batch_of(True)
    given[7:] = [batch.out_cache_loc, *caches]
    want = expected(given, 0.5 if kv_dtype != torch.bfloat16 else 1.0, 1.0)
    before = calls["attention.prologue"]
    q, k, v = module.apply_qk_norm_rope(given[0], given[6], batch)
    assert (k, v) == (None, None) and q.shape == (4, 512) and q.data_ptr() == given[0].data_ptr()
    assert calls["attention.prologue"] == before + 1 and module._used_fused_qk_norm_rope_last_call is False
    check(given, want)


def test_what_is_not_a_decode_step_is_sglangs(ropes: None) -> None:
    module, backend = module_of(), backend_of()
    placed_in(module, backend)
    qkv = torch.zeros(4, 12 * 64, dtype=torch.bfloat16)
    positions = torch.arange(4)
    assert module.apply_qk_norm_rope(qkv, positions, batch_of(False)) == "SGLang's"
    assert module.apply_qk_norm_rope(qkv, positions.expand(3, 4), batch_of(True)) == "SGLang's"
    module.attn.v_scale = torch.tensor(2.0)  # a scale that no number is known of
    assert module.apply_qk_norm_rope(qkv, positions, batch_of(True)) == "SGLang's"
    assert not backend.token_to_kv_pool.get_kv_buffer(3)[0].any()


NORM32 = SimpleNamespace(weight=torch.ones(64), variance_epsilon=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        dict(use_fused_qk_norm_rope=True),
        dict(rotary_emb=OtherRope()),
        dict(rotary_emb=torch.nn.Identity()),
        dict(head_dim=128),
        dict(q_norm=NORM32),
        dict(window_pool=object()),
        dict(token_to_kv_pool=SimpleNamespace(get_kv_buffer=lambda layer: (torch.zeros(2, 2, 4, 64),) * 2)),
    ],
    ids=["flag", "rope", "no rope", "partial", "norm", "window", "layout"],
)
def test_other_modules_and_pools_stay_sglangs(changes: dict[str, Any], ropes: None) -> None:
    ours = {name: value for name, value in changes.items() if name in ("window_pool", "token_to_kv_pool")}
    module = module_of(**{name: value for name, value in changes.items() if name not in ours})
    assert placed_in(module, backend_of(**ours)) == 0
    assert module.apply_qk_norm_rope(None, None, batch_of(True)) == "SGLang's"


def test_rope_settings(ropes: None) -> None:
    for name, value in (("is_neox_style", False), ("use_fallback_kernel", True), ("rotary_dim", 32)):
        rope = Rope()
        setattr(rope, name, value)
        assert placed_in(module_of(rotary_emb=rope), backend_of()) == 0, name


def test_a_later_backend_takes_over(ropes: None) -> None:
    module, first, second = module_of(), backend_of(), backend_of()
    assert placed_in(module, first) == placed_in(module, second) == 1
    assert module.apply_qk_norm_rope.backend is second
    assert module.apply_qk_norm_rope(None, None, batch_of(False)) == "SGLang's"
