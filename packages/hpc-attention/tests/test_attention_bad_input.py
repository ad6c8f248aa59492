"""Bad input: every refusal names operator, argument, expected and got, and the next valid call works."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hpc_attention import DecodePlan, is_supported, prefill, why_not
from hpc_attention.support import FP8, HEAD_DIMS, PAGE_SIZES, SUPPORT
from hpc_attention.testing import Inputs, Problem, devices

pytestmark = pytest.mark.usefixtures("one_thread")
BF16, FP16 = torch.bfloat16, torch.float16
PROBLEM = Problem((130, 70), num_q_heads=4, num_kv_heads=2, head_dim=64)
Change = Callable[[Inputs], dict[str, Any]]


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element away from a 16-byte boundary."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape).copy_(tensor)


def odd_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with rows that are no multiple of 16 bytes apart."""
    room = torch.empty((*tensor.shape[:-1], tensor.shape[-1] + 1), dtype=tensor.dtype, device=tensor.device)
    return room[..., :-1].copy_(tensor)


def wider(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a last dimension of stride 2."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def table(x: Inputs, row: int, column: int, value: int) -> torch.Tensor:
    result = x.cache.page_table.clone()
    result[row, column] = value
    return result


def plan_for(x: Inputs, **changes: Any) -> DecodePlan:
    """A plan like the inputs' own, but for some arguments."""
    arguments = dict(
        max_batch=2, num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=64, kv_dtype=BF16, device=x.q.device
    )
    plan = DecodePlan(**{**arguments, **changes})
    plan.update(x.cache.seq_lens)
    return plan


BAD: list[tuple[str, type[Exception], str, Change]] = [
    ("q no tensor", TypeError, r"q: expected a torch.Tensor, got list", lambda x: {"q": [1.0]}),
    ("q dtype", TypeError, r"q: expected dtype .*bfloat16.*, got torch.float32", lambda x: {"q": x.q.float()}),
    ("q sparse", ValueError, r"q: expected a dense \(strided\) tensor, got layout torch.sparse_coo",
     lambda x: {"q": x.q.to_sparse()}),
    ("q rank", ValueError, r"q: expected shape \[tokens, num_q_heads, head_dim\], got shape", lambda x: {"q": x.q[0]}),
    ("q rows", ValueError, r"q: expected 2 rows \(plan was made for q_len=1", lambda x: {"q": x.q.repeat(2, 1, 1)}),
    ("q stride", ValueError, r"q: expected stride\(\d\) to be a multiple of 16 bytes", lambda x: {"q": odd_rows(x.q)}),
    ("q last", ValueError, r"q: expected a dense last dimension", lambda x: {"q": wider(x.q)}),
    ("q address", ValueError, r"q: expected a 16-byte aligned first element", lambda x: {"q": misaligned(x.q)}),
    ("q heads", ValueError, r"num_q_heads 1 to 16 times num_kv_heads \(2\).*got 3", lambda x: {"q": x.q[:, :3]}),
    ("plan heads", ValueError, r"plan: expected one made for num_q_heads=2", lambda x: {"q": x.q[:, :2]}),
    ("cache dtype", TypeError, r"k_cache: expected dtype torch.bfloat16 .*or torch.float8_e4m3fn, got torch.float16",
     lambda x: {"k_cache": x.cache.k_cache.half()}),
    ("v dtype", TypeError, r"v_cache: expected dtype torch.bfloat16, got torch.float8_e4m3fn",
     lambda x: {"v_cache": x.cache.v_cache.to(FP8)}),
    ("e5m2", TypeError, r"k_cache: expected dtype .*got torch.float8_e5m2",
     lambda x: {"k_cache": x.cache.k_cache.to(torch.float8_e5m2)}),
    ("cache rank", ValueError, r"k_cache: expected shape \[pages, page_size, num_kv_heads, head_dim\]",
     lambda x: {"k_cache": x.cache.k_cache.flatten(0, 1)}),
    ("v shape", ValueError, r"v_cache: expected shape \[\d+, 64, 2, 64\], got shape \[\d+, 64, 1, 64\]",
     lambda x: {"v_cache": x.cache.v_cache[:, :, :1]}),
    ("page size", ValueError, r"k_cache: expected page_size one of \(1, 16, 32, 64, 128, 256\), got 48 \(shape",
     lambda x: {"k_cache": x.cache.k_cache[:, :48], "v_cache": x.cache.v_cache[:, :48]}),
    ("plan page size", ValueError, r"plan: expected one made for page_size=32",
     lambda x: {"k_cache": x.cache.k_cache[:, :32], "v_cache": x.cache.v_cache[:, :32]}),
    ("k stride", ValueError, r"k_cache: expected stride\(\d\) to be a multiple of 16 bytes, got \d+ elements",
     lambda x: {"k_cache": odd_rows(x.cache.k_cache)}),
    ("v stride", ValueError, r"v_cache: expected stride\(\d\) to be a multiple of 16 bytes",
     lambda x: {"v_cache": odd_rows(x.cache.v_cache)}),
    ("v address", ValueError, r"v_cache: expected a 16-byte aligned",
     lambda x: {"v_cache": misaligned(x.cache.v_cache)}),
    ("table dtype", TypeError, r"page_table: expected dtype torch.int32, got torch.int64",
     lambda x: {"page_table": x.cache.page_table.long()}),
    ("table shape", ValueError, r"page_table: expected shape \[2, max_pages\], got shape \[1,",
     lambda x: {"page_table": x.cache.page_table[:1]}),
    ("table stride", ValueError, r"page_table: expected a dense last",
     lambda x: {"page_table": wider(x.cache.page_table)}),
    ("page id", ValueError, r"page_table: expected page ids in \[0, \d+\), got 99 at \[1, 0\]",
     lambda x: {"page_table": table(x, 1, 0, 99)}),
    ("negative page id", ValueError, r"page_table: expected page ids in \[0, \d+\), got -1 at \[0, 2\]",
     lambda x: {"page_table": table(x, 0, 2, -1)}),
    ("capacity", ValueError, r"seq_lens: expected lengths in \[0, 128\].*got 130 \(request 0\)",
     lambda x: {"page_table": x.cache.page_table[:, :2]}),
    ("no plan", TypeError, r"plan: expected a DecodePlan, got NoneType", lambda x: {"plan": None}),
    ("plan dtype", ValueError, r"plan: expected one made for kv_dtype=torch.bfloat16.*got kv_dtype=torch.float8",
     lambda x: {"plan": plan_for(x, kv_dtype=FP8)}),
    ("plan q_len", ValueError, r"q: expected 4 rows \(plan was made for q_len=2",
     lambda x: {"plan": plan_for(x, q_len=2)}),
    ("plan batch", ValueError, r"q: expected 0 rows",
     lambda x: {"plan": DecodePlan(2, 4, 2, 64, 64, device=x.q.device)}),
    ("sm_scale type", TypeError, r"sm_scale: expected a float or None, got str", lambda x: {"sm_scale": "1"}),
    ("sm_scale nan", ValueError, r"sm_scale: expected a finite number, got nan", lambda x: {"sm_scale": float("nan")}),
    ("softcap", ValueError, r"softcap: expected a positive number or None, got 0", lambda x: {"softcap": 0}),
    ("sm_scale of an int", ValueError, r"sm_scale: expected a number in fp32's range.*got an int of 1329 bits",
     lambda x: {"sm_scale": 10**400}),
    ("k_scale of an int", ValueError, r"k_scale: .*fp32's range.*an int of", lambda x: {"k_scale": -(10**400)}),
    ("v_scale of an int", ValueError, r"v_scale: .*fp32's range.*an int of", lambda x: {"v_scale": 10**5000}),
    ("softcap of an int", ValueError, r"softcap: .*fp32's range.*an int of", lambda x: {"softcap": 10**400}),
    ("sm_scale range", ValueError, r"sm_scale: expected a number in fp32's range, at most 3.4028235e\+38 in size",
     lambda x: {"sm_scale": 1e300}),
    ("k_scale range", ValueError, r"k_scale: expected a number in fp32's range", lambda x: {"k_scale": -1e39}),
    ("v_scale range", ValueError, r"v_scale: expected a number in fp32's range", lambda x: {"v_scale": 1e39}),
    ("softcap range", ValueError, r"softcap: expected a number in fp32's range, at most", lambda x: {"softcap": 1e39}),
    ("softcap low", ValueError, r"softcap: .*fp32's range, at least 1.17549\d+e-38", lambda x: {"softcap": 1e-45}),
    ("both scales", ValueError, r"k_scale: expected sm_scale \* k_scale to be a number in fp32's range",
     lambda x: {"sm_scale": 1e30, "k_scale": 1e30}),
    ("return_lse", TypeError, r"return_lse: expected a bool, got int 1", lambda x: {"return_lse": 1}),
    ("return_lse text", TypeError, r"return_lse: expected a bool, got str 'no'", lambda x: {"return_lse": "no"}),
    ("q_scale type", TypeError, r"q_scale: expected a torch.Tensor, got float", lambda x: {"q_scale": 0.5}),
    ("sinks shape", ValueError, r"sinks: expected shape \[4\], got shape \[5\]",
     lambda x: {"sinks": x.q.new_ones(5).float()}),
    ("sinks dtype", TypeError, r"sinks: expected dtype torch.float32", lambda x: {"sinks": x.q.new_ones(4)}),
    ("k_scale dtype", TypeError, r"k_scale: expected dtype torch.float32", lambda x: {"k_scale": x.q.new_ones(1)}),
    ("k_scale shape", ValueError, r"k_scale: expected a float or shape \[1\] or \[2\] or \[\d+, 64, 2\], got shape",
     lambda x: {"k_scale": torch.ones(3, device=x.q.device)}),
    ("v_scale shape", ValueError, r"v_scale: expected a float or shape \[1\] or \[2\], got shape \[\d+, 64, 2\]",
     lambda x: {"v_scale": torch.ones(x.cache.k_cache.shape[:3], device=x.q.device)}),
    ("v_scale type", TypeError, r"v_scale: expected a float or None, got bool", lambda x: {"v_scale": True}),
    ("q_scale", ValueError, r"q_scale: expected None for a torch.bfloat16 query",
     lambda x: {"q_scale": torch.ones(2, 4, device=x.q.device)}),
    ("out dtype", TypeError, r"out: expected dtype torch.bfloat16, got torch.float32",
     lambda x: {"out": torch.empty_like(x.q, dtype=torch.float32)}),
    ("out shape", ValueError, r"out: expected shape \[2, 4, 64\]", lambda x: {"out": torch.empty_like(x.q)[:1]}),
    ("out overlap", ValueError, r"out: expected rows that do not overlap, got strides \[0, 64, 1\]",
     lambda x: {"out": torch.empty_like(x.q)[:1].expand(2, -1, -1)}),
    ("out rows overlap", ValueError, r"out: expected rows that do not overlap, got strides \[256, 56, 1\]",
     lambda x: {"out": torch.empty_like(x.q).as_strided((2, 4, 64), (256, 56, 1))}),
    ("out tokens overlap", ValueError, r"out: expected rows that do not overlap, got strides \[248, 64, 1\]",
     lambda x: {"out": torch.empty_like(x.q).as_strided((2, 4, 64), (248, 64, 1))}),
    ("out heads overlap", ValueError, r"out: expected rows that do not overlap, got strides \[64, 120, 1\]",
     lambda x: {"out": torch.empty_like(x.q).as_strided((2, 4, 64), (64, 120, 1))}),
    ("out stride", ValueError, r"out: expected stride\(\d\) to be a multiple of 16 bytes",
     lambda x: {"out": odd_rows(x.q)}),
]  # fmt: skip


@pytest.mark.parametrize("device", devices(PROBLEM))
@pytest.mark.parametrize(("error", "message", "change"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_decode_refuses(
    error: type[Exception], message: str, change: Change, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_DEBUG", "1")  # values are checked on a GPU too
    inputs = PROBLEM.make(device)
    with pytest.raises(error, match=f"^hpc_attention.decode: .*{message}"):
        inputs.run(**change(inputs))
    inputs.check(*inputs.run())


@pytest.mark.parametrize("device", devices(replace(PROBLEM, q_dtype=FP8)))
def test_e4m3_query_needs_its_scales_and_an_e4m3_cache(device: str) -> None:
    inputs = replace(PROBLEM, q_dtype=FP8).make(device)
    scale = inputs.options["q_scale"]
    with pytest.raises(ValueError, match=r"q_scale: expected shape \[2, 4\] for a torch.float8_e4m3fn query, got None"):
        inputs.run(q_scale=None)
    with pytest.raises(ValueError, match=r"q_scale: expected shape \[2, 4\], got shape \[2, 1\]"):
        inputs.run(q_scale=scale[:, :1])
    with pytest.raises(TypeError, match=r"k_cache: expected dtype torch.float8_e4m3fn, got torch.bfloat16"):
        inputs.run(k_cache=inputs.cache.k_cache.to(BF16), v_cache=inputs.cache.v_cache.to(BF16))
    with pytest.raises(TypeError, match=r"out: expected dtype torch.bfloat16"):
        inputs.run(out=torch.empty_like(inputs.q))
    inputs.check(*inputs.run())


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, r"sm_scale: expected a number in fp32's range", {"sm_scale": 1e300}),
        (ValueError, r"v_scale: expected a number in fp32's range", {"v_scale": 10**400}),
        (ValueError, r"k_scale: expected sm_scale \* k_scale to be", {"sm_scale": 1e30, "k_scale": 1e30}),
        (ValueError, r"softcap: expected a number in fp32's range", {"softcap": 1e39}),
        (TypeError, r"return_lse: expected a bool, got NoneType None", {"return_lse": None}),
    ],
)
def test_prefill_refuses_the_same(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    inputs = PROBLEM.make()
    cache, starts = inputs.cache, torch.tensor([0, 1, 2], dtype=torch.int32)
    arguments = (inputs.q, cache.k_cache, cache.v_cache, cache.page_table, starts, cache.seq_lens, 1)
    with pytest.raises(error, match=f"^hpc_attention.prefill: {message}"):
        prefill(*arguments, **options)


def test_the_softcaps_at_both_ends_of_fp32_give_numbers() -> None:
    for softcap in (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max):
        inputs = replace(PROBLEM, softcap=softcap).make()
        inputs.check(*inputs.run())


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 4, 64), (64, 128, 1)), ((2, 4, 64), (320, 72, 1)), ((2, 4, 64), (64, 2048, 1))]
)
def test_any_out_whose_rows_lie_apart_is_written(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    inputs = PROBLEM.make()
    out = torch.full((8192,), float("nan"), dtype=BF16).as_strided(shape, strides)
    _, lse = inputs.run(out=out)
    inputs.check(out, lse)


def test_unsupported_sizes_name_the_supported_ones() -> None:
    """A head_dim of 72, a ratio of 17: the same words from the plan, the operator and the table (A26, A27)."""
    q = torch.zeros(2, 16, 72, dtype=BF16)
    cache = torch.zeros(4, 64, 16, 72, dtype=BF16)
    cu, lens, pages = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [1, 1], [[0], [1]]))
    with pytest.raises(ValueError, match=r"head_dim one of \(64, 128, 256\), got 72 \(shape \[2, 16, 72\]\)"):
        prefill(q, cache, cache, pages, cu, lens, 1)
    with pytest.raises(ValueError, match=r"head_dim: expected one of \(64, 128, 256\), got 72"):
        DecodePlan(2, 16, 16, 72, 64, device="cpu")
    assert why_not(head_dim=72, num_q_heads=16, num_kv_heads=16) == "head_dim: expected one of (64, 128, 256), got 72"
    with pytest.raises(ValueError, match=r"page_size: expected one of \(1, 16, 32, 64, 128, 256\), got 48"):
        DecodePlan(2, 16, 16, 64, 48, device="cpu")
    for q_len in (0, 9):  # one word with one meaning: at least the one new token (A4)
        with pytest.raises(ValueError, match=rf"q_len: expected 1 to 8, got {q_len}"):
            DecodePlan(2, 16, 16, 64, 64, q_len=q_len, device="cpu")


def test_tensors_on_two_devices() -> None:
    inputs = PROBLEM.make()
    for name in ("k_cache", "v_cache", "page_table"):
        moved = getattr(inputs.cache, name).to("meta")
        with pytest.raises(ValueError, match=rf"{name}: expected device cpu \(the device of q\), got device meta"):
            inputs.run(**{name: moved})
    with pytest.raises(ValueError, match=r"plan: expected one made for device meta"):
        meta = {n: getattr(inputs.cache, n).to("meta") for n in ("k_cache", "v_cache", "page_table")}
        inputs.run(q=inputs.q.to("meta"), **meta)


# ---- The support table ----

GRID = list(
    itertools.product(
        (BF16, FP16, FP8, torch.float32), (BF16, FP8, torch.float8_e5m2), (64, 72, 128, 192), (1, 48, 64),
        ((8, 1), (17, 1), (6, 4), (12, 4)), (0, 1, 8, 9),
    )
)  # fmt: skip


def test_what_the_table_says_is_what_decode_does() -> None:
    """is_supported is true exactly where a plan can be made and decode runs."""
    agreed = {True: 0, False: 0}
    for q_dtype, kv_dtype, dim, page, (q_heads, kv_heads), q_len in GRID:
        says = is_supported(
            q_dtype=q_dtype, kv_dtype=kv_dtype, head_dim=dim, page_size=page, num_q_heads=q_heads,
            num_kv_heads=kv_heads, q_len=q_len, device="cpu",
        )  # fmt: skip
        problem = Problem((3,), q_heads, kv_heads, dim, page, q_len, q_dtype, kv_dtype)
        try:
            problem.make().run()
            runs = True
        except (TypeError, ValueError):
            runs = False
        assert says == runs, problem
        agreed[says] += 1
    assert agreed[True] == 4 * 2 * 2 * 2 * 2 and agreed[False] > 500


def test_table_covers_every_problem() -> None:
    names = {(row.operator, row.feature) for row in SUPPORT}
    assert len(names) == len(SUPPORT)
    for dim, page in itertools.product(HEAD_DIMS, PAGE_SIZES):
        assert is_supported(head_dim=dim, page_size=page, device="cpu")
        assert is_supported(operator="prefill", head_dim=dim, page_size=page, device="cpu")
    assert not is_supported(operator="prefill", q_dtype=FP8, device="cpu")
    assert "expected decode or prefill" in str(pytest.raises(ValueError, why_not, operator="mla").value)
    assert "window" in why_not(window=0, device="cpu")


def test_a_device_without_kernel_is_refused_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table says of a Hopper GPU, without one: every reason names feature and cause."""
    from hpc_common import capability
    from hpc_common.capability import Capability

    hopper = Capability("cuda:0", "a Hopper GPU", (9, 0), 132, True, "")
    ampere = Capability("cuda:0", "an Ampere GPU", (8, 0), 108, False, "compute capability 8.0; the kernels need 9.0")
    rows = {row.feature: row.cuda for row in SUPPORT if row.operator == "prefill"}
    monkeypatch.setattr(capability, "capability", lambda device=None: hopper)
    for feature, kv in (("16-bit query and cache", BF16), ("16-bit query, e4m3 cache", FP8)):
        reason = why_not(operator="prefill", kv_dtype=kv, device="cuda:0")
        assert (reason == "") == rows[feature] and (rows[feature] or reason.startswith(feature))
    monkeypatch.setattr(capability, "capability", lambda device=None: ampere)
    assert "an Ampere GPU" in why_not(device="cuda:0") and "9.0" in why_not(device="cuda:0")


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("gpu", ValueError, r"expected the name of a device .*, got \'gpu\'"),
        ("cuda:99", ValueError, r"expected one of \d+ visible GPUs, got cuda:99"),
        ("meta", ValueError, r"expected cpu or cuda, got meta"),
        (-1, TypeError, r"expected a torch.device, a device's name or None, got int -1"),
        (b"z", TypeError, r"got bytes b'z'"),
        (1.5, TypeError, r"got float 1.5"),
        (True, TypeError, r"got bool True"),
    ],
)
def test_a_plan_says_which_devices_there_are(device: Any, error: type[Exception], message: str) -> None:
    for make in (DecodePlan, DecodePlan.sizes):
        with pytest.raises(error, match=rf"^hpc_attention.DecodePlan: device: .*{message}"):
            make(2, 4, 2, 64, 64, device=device)


@pytest.mark.parametrize("name", ["head_dim", "num_q_heads", "num_kv_heads", "page_size", "q_len", "window"])
def test_is_supported_takes_numbers(name: str) -> None:
    for value in ("x", 64.0, True):
        with pytest.raises(
            TypeError, match=rf"^hpc_attention.is_supported: {name}: expected an int, got {type(value).__name__}"
        ):
            is_supported(**{name: value}, device="cpu")


def test_is_supported_takes_dtypes_and_devices() -> None:
    for name in ("q_dtype", "kv_dtype"):
        with pytest.raises(TypeError, match=rf"is_supported: {name}: expected a torch.dtype, got str 'bf16'"):
            is_supported(**{name: "bf16"}, device="cpu")
    with pytest.raises(TypeError, match=r"is_supported: device: expected .*, got int 0"):
        is_supported(device=0)
    with pytest.raises(ValueError, match=r"is_supported: device: expected the name of a device .*, got 'gpu'"):
        is_supported(device="gpu")


@pytest.mark.parametrize("operator", ["decode", "prefill"])
def test_a_device_that_runs_nothing_is_a_reason(operator: str) -> None:
    for device in ("meta", "cuda:99", *(() if torch.cuda.is_available() else ("cuda",))):
        assert not is_supported(operator=operator, device=device)
        assert device in why_not(operator=operator, device=torch.device(device))
    assert "visible GPUs" in why_not(operator=operator, device="cuda:99")
