"""decode against the float64 reference, and the reference against torch's own attention."""

from dataclasses import replace

import pytest
import torch
from hpc_attention.support import FP8, PAGE_SIZES, SUPPORT
from hpc_attention.testing import Problem, on_devices
from hpc_common.poison import LAYOUTS
from hpc_common.testing import device_params
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("one_thread")
BF16, FP16 = torch.bfloat16, torch.float16
# Whole pages and tiles, one more and one less, nothing, one token, and one request that spreads over many CTAs.
LENGTHS = (130, 0, 64, 1, 1500, 63, 65, 257)
MIXED = Problem(lengths=LENGTHS, num_q_heads=8, num_kv_heads=2)


def sdpa(problem: Problem, inputs, request: int) -> torch.Tensor:
    """One request's output by torch's attention on the dense keys and values, float64 [q_len, Hq, D]."""
    length, q_len = problem.lengths[request], problem.q_len
    q = inputs.q[request * q_len : (request + 1) * q_len].cpu().to(torch.float64)
    if "q_scale" in inputs.options:
        q = q * inputs.options["q_scale"][request * q_len : (request + 1) * q_len].cpu().unsqueeze(-1)
    last = torch.arange(q_len).unsqueeze(1) + length - q_len
    position = torch.arange(length)
    mask = position <= last
    if problem.window:
        mask &= position > last - problem.window
    keys, values = (x[request].to(torch.float64).transpose(0, 1) for x in (inputs.keys, inputs.values))
    out = scaled_dot_product_attention(
        q.transpose(0, 1), keys, values, attn_mask=mask, scale=problem.sm_scale, enable_gqa=True
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices(
        replace(MIXED, q_dtype=q_dtype, kv_dtype=kv_dtype, head_dim=dim, page_size=page, layout=layout)
        for q_dtype, kv_dtype in ((BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8), (FP8, FP8))
        for dim, page, layout in ((64, 1, "HND"), (128, 64, "NHD"), (256, 16, "interleaved"))
    ),
)
def test_types_and_head_dims(problem: Problem, device: str) -> None:
    inputs = problem.make(device)
    inputs.check(*inputs.run())


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices(
        replace(MIXED, page_size=page, layout=layout, kv_dtype=kv)
        for page in PAGE_SIZES
        for layout in LAYOUTS
        for kv in (BF16, FP8)
    ),
)
def test_page_sizes_and_layouts(problem: Problem, device: str) -> None:
    inputs = problem.make(device)
    inputs.check(*inputs.run())


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices(
        replace(MIXED, num_q_heads=ratio * heads, num_kv_heads=heads, kv_dtype=FP8, head_dim=64)
        for ratio in range(1, 17)
        for heads in (1, 3)
    ),
)
def test_every_ratio_of_heads(problem: Problem, device: str) -> None:
    inputs = problem.make(device)
    inputs.check(*inputs.run())


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices(
        replace(MIXED, lengths=(*LENGTHS, 2, 5), q_len=q_len, num_q_heads=heads, num_kv_heads=1, kv_dtype=kv)
        for q_len in range(1, 9)
        for heads, kv in ((8, BF16), (5, FP8), (16, FP8))
    ),
)
def test_every_q_len(problem: Problem, device: str) -> None:
    """Requests shorter than q_len have rows that see nothing: zeros and -inf, never NaN."""
    inputs = problem.make(device)
    out, lse = inputs.run()
    assert not out.isnan().any() and not lse.isnan().any()
    inputs.check(out, lse)


@pytest.mark.parametrize(
    ("problem", "device"),
    on_devices(
        replace(MIXED, lengths=(700, 64, 1, 2049), window=window, q_len=q_len, kv_dtype=kv)
        for window in (1, 2, 63, 64, 65, 128, 1000, 1 << 20)
        for q_len, kv in ((1, BF16), (4, FP8))
    ),
)
def test_windows(problem: Problem, device: str) -> None:
    inputs = problem.make(device)
    inputs.check(*inputs.run())


@pytest.mark.parametrize("num_ctas", [1, 2, 7, 132, 1024])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_any_number_of_ctas(num_ctas: int, batch_invariant: bool) -> None:
    """The result does not depend on how many CTAs share the work; one CTA means no partial result."""
    inputs = replace(MIXED, num_ctas=num_ctas, batch_invariant=batch_invariant, kv_dtype=FP8, head_dim=64).make()
    inputs.check(*inputs.run())


@pytest.mark.parametrize(
    "problem",
    [
        Problem(lengths=(1, 70, 1024), num_q_heads=8, num_kv_heads=2),
        Problem(lengths=(70, 515), num_q_heads=6, num_kv_heads=2, q_len=5, q_dtype=FP16, head_dim=64, layout="HND"),
        Problem(lengths=(130, 515), q_len=3, kv_dtype=FP8, window=40, page_size=16, layout="uneven"),
        Problem(lengths=(130, 33), num_kv_heads=8, q_dtype=FP8, head_dim=256, page_size=1, sm_scale=0.2),
    ],
    ids=["bf16", "fp16", "e4m3 cache", "e4m3"],
)
def test_against_torch(problem: Problem) -> None:
    """torch's attention on the dense tensors: independent of the paged reference, which it also confirms."""
    inputs = problem.make()
    out, _ = inputs.run()
    reference, _, spread = inputs.reference()
    for request in range(len(problem.lengths)):
        rows = slice(request * problem.q_len, (request + 1) * problem.q_len)
        want = sdpa(problem, inputs, request)
        torch.testing.assert_close(reference[rows], want, rtol=1e-12, atol=1e-12)
        bound = 2.0**-8 * want.abs() + 2.0**-18 * spread[rows]
        assert bool(((out[rows].to(torch.float64) - want).abs() <= bound).all())


sizes = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.one_of(st.integers(0, 700), st.sampled_from([0, 1, 63, 64, 65])), max_size=5).map(tuple),
        "num_kv_heads": st.integers(1, 3),
        "head_dim": st.sampled_from([64, 128]),
        "page_size": st.sampled_from(PAGE_SIZES),
        "q_len": st.integers(1, 8),
        "layout": st.sampled_from(LAYOUTS),
        "window": st.one_of(st.none(), st.integers(1, 800)),
        "batch_invariant": st.booleans(),
        "num_ctas": st.integers(1, 200),
        "softcap": st.one_of(st.none(), st.floats(1, 30)),
        "sinks": st.booleans(),
        "k_scale": st.sampled_from([None, "float", "one", "head", "token"]),
        "v_scale": st.sampled_from([None, "float", "one", "head"]),
        "seed": st.integers(0, 1000),
    }
)
dtypes = st.sampled_from([(BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8), (FP8, FP8)])


EVERY_FEATURE = sorted({row.feature for row in SUPPORT if row.operator == "decode"})


@pytest.mark.parametrize("device", device_params(SUPPORT, "decode", *EVERY_FEATURE))
@settings(max_examples=settings.default.max_examples * 2)
@given(size=sizes, ratio=st.integers(1, 16), pair=dtypes)
def test_any_small_problem(size: dict, ratio: int, pair: tuple[torch.dtype, torch.dtype], device: str) -> None:
    if not size["lengths"]:
        size["lengths"] = (0,)
    problem = Problem(num_q_heads=ratio * size["num_kv_heads"], q_dtype=pair[0], kv_dtype=pair[1], **size)
    inputs = problem.make(device)
    inputs.check(*inputs.run())
