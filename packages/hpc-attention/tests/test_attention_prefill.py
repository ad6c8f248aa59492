"""prefill against the float64 reference, torch, and decode; its bad input."""

from typing import Any

import pytest
import torch
from hpc_attention import DecodePlan, _cpu, decode, prefill
from hpc_attention.support import FP8, PAGE_SIZES, SUPPORT, features
from hpc_common.poison import LAYOUTS, WILD_PAGE, PagedCache, fill_nan_, paged_cache
from hpc_common.reference import attention as reference
from hpc_common.testing import device_params
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("one_thread")
BF16, FP16 = torch.bfloat16, torch.float16
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11}  # of one rounding to nearest, relative, at most


def on(*cases: tuple[torch.dtype, torch.dtype]) -> list[Any]:
    used = {feature for q, kv in cases for feature in features("prefill", q, kv, 64, 1)}
    return device_params(SUPPORT, "prefill", *sorted(used))


def make(
    lengths: list[int], new: list[int], heads: tuple[int, int] = (8, 2), dim: int = 64, page_size: int = 16,
    q_dtype: torch.dtype = BF16, kv_dtype: torch.dtype | None = None, layout: str = "NHD", device: str = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, PagedCache, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:  # fmt: skip
    """(q, cache, cu_seqlens_q, dense keys, dense values); ``new[b]`` of the ``lengths[b]`` tokens are queries."""
    generator = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or q_dtype

    def draw(n: int) -> torch.Tensor:
        return torch.randn(n, heads[1], dim, generator=generator).to(kv_dtype)

    keys, values = [draw(n) for n in lengths], [draw(n) for n in lengths]
    q = torch.randn(sum(new), heads[0], dim, generator=generator).to(q_dtype).to(device)
    cache = paged_cache(keys, values, page_size, layout, seed=seed, device=device)
    starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32).to(device)
    return q, cache, starts, keys, values


def check(q, cache: PagedCache, starts, result, **options: Any) -> None:
    """The result within rounding of the reference; see ``hpc_attention.testing.Inputs.check`` for the bound."""
    out, lse = result
    lens = cache.seq_lens
    want, want_lse = reference.paged_attention(
        q, cache.k_cache, cache.v_cache, cache.page_table, starts, lens, **options
    )
    magnitudes = cache.v_cache.to(torch.float32).abs()
    spread, _ = reference.paged_attention(q, cache.k_cache, magnitudes, cache.page_table, starts, lens, **options)
    weights = 2.0**-18 if q.device.type == "cpu" else 2.0**-18 + ROUNDING[q.dtype]
    bound = ROUNDING[out.dtype] * want.abs() + weights * spread + 2.0**-25
    assert bool(((out.cpu().to(torch.float64) - want).abs() <= bound).all())
    lse = lse.cpu().to(torch.float64)
    close = (lse == want_lse) | ((lse - want_lse).abs() <= 2.0**-20 * (8 + want_lse.abs().nan_to_num(posinf=0.0)))
    assert bool(close.all())


def run(q, cache: PagedCache, starts, **options: Any):
    longest = int(starts.diff().max()) if len(starts) > 1 else 0
    return prefill(
        q, cache.k_cache, cache.v_cache, cache.page_table, starts, cache.seq_lens, longest, return_lse=True, **options
    )


LENGTHS, NEW = [130, 0, 64, 300, 65, 9], [130, 0, 1, 77, 65, 9]  # whole prompts, a token, a chunk after a prefix


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "device"),
    [
        pytest.param(q, kv, *(d.values if hasattr(d, "values") else [d]), marks=getattr(d, "marks", ()))
        for q, kv in ((BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8))
        for d in on((q, kv))
    ],
)
@pytest.mark.parametrize(
    ("dim", "page_size", "layout"), [(64, 1, "HND"), (128, 64, "uneven"), (256, 16, "interleaved")]
)
def test_values(q_dtype, kv_dtype, device, dim, page_size, layout) -> None:
    q, cache, starts, *_ = make(LENGTHS, NEW, (6, 2), dim, page_size, q_dtype, kv_dtype, layout, device)
    check(q, cache, starts, run(q, cache, starts))


@pytest.mark.parametrize(
    "options",
    [
        {"sm_scale": 0.03},
        {"softcap": 3.0},
        {"window": 1},
        {"window": 33},
        {"window": 1000},
        {"sinks": torch.linspace(-2, 3, 8)},
        {"k_scale": 0.5, "v_scale": 2.0},
        {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0, 0.25])},
        {"window": 50, "softcap": 5.0, "sinks": torch.ones(8), "k_scale": torch.tensor([0.5]), "sm_scale": 0.2},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("device", on((BF16, FP8)))
def test_options(options: dict[str, Any], device: str) -> None:
    q, cache, starts, *_ = make(LENGTHS, NEW, kv_dtype=FP8, device=device)
    options = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    check(q, cache, starts, run(q, cache, starts, **options), **options)
    if options != {"window": 1000}:  # longer than every request: the same as none
        with pytest.raises(AssertionError):  # the check sees an option left out
            check(q, cache, starts, run(q, cache, starts), **options)


@pytest.mark.parametrize("device", on((BF16, FP8)))
def test_key_scales_of_every_token(device: str) -> None:
    q, cache, starts, *_ = make(LENGTHS, NEW, kv_dtype=FP8, device=device)
    scale = cache.scatter([0.5 + torch.rand(n, 2) for n in LENGTHS])
    assert bool(scale.isnan().any())
    check(q, cache, starts, run(q, cache, starts, k_scale=scale), k_scale=scale)


def test_against_torch() -> None:
    """torch's attention on the dense tensors, whole prompts and a chunk behind a cached prefix."""
    q, cache, starts, keys, values = make([130, 300], [130, 77], (8, 2), 128)
    out, _ = run(q, cache, starts)
    for request, (length, new) in enumerate(((130, 130), (300, 77))):
        mask = torch.arange(length) <= torch.arange(length - new, length).unsqueeze(1)
        rows = slice(int(starts[request]), int(starts[request + 1]))
        dense = [x[request].to(torch.float64).transpose(0, 1) for x in (keys, values)]
        want = scaled_dot_product_attention(
            q[rows].to(torch.float64).transpose(0, 1), *dense, attn_mask=mask, enable_gqa=True
        ).transpose(0, 1)
        torch.testing.assert_close(out[rows].to(torch.float64), want, rtol=2.0**-8, atol=2.0**-17)


@pytest.mark.parametrize("device", on((BF16, BF16)))
def test_chunks_equal_the_whole_prompt(device: str) -> None:
    """A prompt in chunks over a growing cache gives what it gives at once, whatever the chunks."""
    q, cache, starts, *_ = make([200], [200], device=device)
    whole, whole_lse = run(q, cache, starts)
    for chunks in ([1, 199], [64, 64, 72], [7] * 28 + [4]):
        done = 0
        for chunk in chunks:
            cache.seq_lens.fill_(done + chunk)
            part_starts = torch.tensor([0, chunk], dtype=torch.int32, device=device)
            out, lse = run(q[done : done + chunk], cache, part_starts)
            torch.testing.assert_close(out, whole[done : done + chunk], rtol=2.0**-7, atol=2.0**-16)
            torch.testing.assert_close(lse, whole_lse[done : done + chunk], rtol=1e-5, atol=1e-5)
            done += chunk


@pytest.mark.parametrize("device", on((BF16, BF16)))
def test_blocks_of_rows_change_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts run in blocks of rows; the block's size is not seen in the result."""
    q, cache, starts, *_ = make(LENGTHS, NEW, device=device)
    whole, _ = run(q, cache, starts, window=40)
    monkeypatch.setattr(_cpu, "_PREFILL_SCORES", 5000)
    small = run(q, cache, starts, window=40)
    torch.testing.assert_close(small[0], whole, rtol=2.0**-7, atol=2.0**-16)
    check(q, cache, starts, small, window=40)


@pytest.mark.parametrize("window", [None, 30])
def test_decode_rows_agree_with_decode(window: int | None) -> None:
    """The last q_len tokens of every request by either operator."""
    lengths, q_len = [130, 2, 300, 0], 4
    q, cache, starts, *_ = make(lengths, [q_len] * 4)
    plan = DecodePlan(4, 8, 2, 64, 16, q_len=q_len, window=window, kv_dtype=BF16, device="cpu")
    plan.update(cache.seq_lens)
    by_decode, decode_lse = decode(q, cache.k_cache, cache.v_cache, cache.page_table, plan, return_lse=True)
    by_prefill, lse = run(q, cache, starts, window=window)
    torch.testing.assert_close(by_prefill, by_decode, rtol=2.0**-7, atol=2.0**-16)
    torch.testing.assert_close(lse, decode_lse, rtol=1e-5, atol=1e-5)
    assert bool((by_prefill[12:] == 0).all()) and bool((lse[12:] == -float("inf")).all())


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("device", on((BF16, BF16)))
def test_nan_in_unused_slots_never_reaches_the_output(window: int | None, device: str) -> None:
    q, cache, starts, *_ = make([130, 70], [20, 70], device=device)
    if window:  # tokens that slid out of the first row's window: any page id
        cache.page_table[0, : (130 - 20 + 1 - window) // 16] = WILD_PAGE
    out = fill_nan_(torch.empty_like(q))
    result, lse = run(q, cache, starts, window=window, out=out)
    assert result is out and bool(out.isfinite().all()) and bool(lse.isfinite().all())


@pytest.mark.parametrize("device", on((BF16, BF16)))
def test_nothing_to_do(device: str) -> None:
    q, cache, starts, *_ = make([5, 0], [0, 0], device=device)
    out, lse = run(q, cache, starts)
    assert out.shape == (0, 8, 64) and lse.shape == (0, 8)


@given(
    parts=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 60)), min_size=1, max_size=4),
    page_size=st.sampled_from(PAGE_SIZES),
    layout=st.sampled_from(LAYOUTS),
    ratio=st.integers(1, 6),
    window=st.one_of(st.none(), st.integers(1, 200)),
    fp8=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_small_problem(parts, page_size, layout, ratio, window, fp8, seed) -> None:
    """Any prefix and any number of new tokens, also more rows than tokens: those see nothing."""
    lengths, new = [a + b for a, b in parts], [b + seed % 3 for _, b in parts]
    q, cache, starts, *_ = make(
        lengths, new, (2 * ratio, 2), 64, page_size, BF16, FP8 if fp8 else BF16, layout, seed=seed
    )
    check(q, cache, starts, run(q, cache, starts, window=window), window=window)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, r"q: expected dtype torch.bfloat16 or torch.float16, got torch.float8", {"q": "fp8"}),
        (TypeError, r"cu_seqlens_q: expected dtype torch.int32", {"cu_seqlens_q": torch.tensor([0, 5, 12])}),
        (ValueError, r"cu_seqlens_q: expected shape \[3\]", {"cu_seqlens_q": torch.tensor([0, 12]).int()}),
        (ValueError, r"cu_seqlens_q: expected starts from 0 to 12", {"cu_seqlens_q": torch.tensor([0, 5, 11]).int()}),
        (ValueError, r"cu_seqlens_q: expected starts .* never fall", {"cu_seqlens_q": torch.tensor([0, 13, 12]).int()}),
        (ValueError, r"seq_lens: expected a dense vector", {"seq_lens": torch.ones(2, 1).int()}),
        (ValueError, r"seq_lens: expected lengths in \[0, 96\].*got -1", {"seq_lens": torch.tensor([-1, 9]).int()}),
        (ValueError, r"seq_lens: expected lengths in \[0, 96\].*got 97", {"seq_lens": torch.tensor([9, 97]).int()}),
        (ValueError, r"max_seqlen_q: expected at least 7", {"max_seqlen_q": 6}),
        (TypeError, r"max_seqlen_q: expected an int", {"max_seqlen_q": 7.0}),
        (ValueError, r"page_table: expected shape \[2, max_pages\]", {"page_table": torch.zeros(1, 6).int()}),
        (ValueError, r"page_table: expected page ids in \[0, 9\), got 9", {"page_table": torch.full((2, 6), 9).int()}),
        (ValueError, r"window: expected an int in \[1,", {"window": 0}),
        (ValueError, r"softcap: expected a positive number", {"softcap": -1.0}),
        (ValueError, r"sinks: expected shape \[8\]", {"sinks": torch.ones(2)}),
        (ValueError, r"v_scale: expected a float or shape \[1\] or \[2\], got", {"v_scale": torch.ones(9, 16, 2)}),
        (TypeError, r"out: expected dtype torch.bfloat16", {"out": torch.empty(12, 8, 64)}),
    ],
)
def test_bad_input(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    q, cache, starts, *_ = make([20, 60], [5, 7])
    if "q" in changes:
        changes = {"q": q.to(FP8)}
    arguments = dict(
        q=q, k_cache=cache.k_cache, v_cache=cache.v_cache, page_table=cache.page_table, cu_seqlens_q=starts,
        seq_lens=cache.seq_lens, max_seqlen_q=7,
    )  # fmt: skip
    with pytest.raises(error, match=f"^hpc_attention.prefill: {message}"):
        prefill(**{**arguments, **changes})
    check(q, cache, starts, prefill(**arguments, return_lse=True))
