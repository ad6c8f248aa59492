"""Bad input: a ValueError or TypeError that names operator, argument, what was expected and what came."""

from collections.abc import Callable

import hpc_common.capability as common_capability
import numpy as np
import pytest
import torch
from hpc_common.capability import Capability
from hpc_common.testing import device_params
from hpc_router_gemm import RouterWeight, is_supported, linear, route, router_gemm, why_not
from hpc_router_gemm.support import SUPPORT

DEVICES = device_params(SUPPORT, "router_gemm", "fp32 weight, terms 1 to 3")
pytestmark = pytest.mark.usefixtures("one_thread")

M, N, K = 4, 12, 64


def x_of(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape or (M, K), dtype=dtype, device=device)


def w_of(device: str) -> RouterWeight:
    return RouterWeight(torch.ones((N, K), device=device))


# For each public function that takes x: a call with a given x.
TAKES_X: dict[str, Callable[[torch.Tensor, str], object]] = {
    "router_gemm": lambda x, d: router_gemm(x, w_of(d)),
    "linear": lambda x, d: linear(x, torch.ones((N, K), device=d)),
    "route": lambda x, d: route(x, w_of(d), 2),
}

BAD_X: dict[str, tuple[Callable[[str], object], type[Exception], str]] = {
    "fp16": (lambda d: x_of(d, dtype=torch.float16), TypeError, "expected dtype torch.bfloat16, got torch.float16"),
    "fp32": (lambda d: x_of(d, dtype=torch.float32), TypeError, "expected dtype torch.bfloat16, got torch.float32"),
    "list": (lambda d: [[1.0] * K], TypeError, "expected a torch.Tensor, got list"),
    "sparse": (
        lambda d: x_of(d).to_sparse(),
        ValueError,
        r"expected a dense \(strided\) tensor, got layout torch.sparse_coo",
    ),
    "nested": (
        lambda d: torch.nested.as_nested_tensor(list(x_of(d)), layout=torch.jagged),
        ValueError,
        r"expected a dense \(strided\) tensor, got layout torch.jagged",
    ),
    "another K": (lambda d: x_of(d, M, K + 8), ValueError, r"expected shape \[M, 64\], got shape \[4, 72\]"),
    "one dimension": (lambda d: x_of(d, K), ValueError, r"expected shape \[M, 64\], got shape \[64\]"),
    "three dimensions": (lambda d: x_of(d, 1, M, K), ValueError, r"expected shape \[M, 64\]"),
    "every other column": (lambda d: x_of(d, M, 2 * K)[:, ::2], ValueError, "expected a dense last dimension"),
    "transposed": (lambda d: x_of(d, K, M).T, ValueError, "expected a dense last dimension"),
    "row stride of 130 bytes": (
        lambda d: x_of(d, M, K + 1)[:, :K],
        ValueError,
        r"expected stride\(0\) to be a multiple of 16 bytes, got 65 elements of 2 bytes",
    ),
    "base off by 2 bytes": (
        lambda d: x_of(d, M, K + 8)[:, 1 : K + 1],
        ValueError,
        "expected a 16-byte aligned first element, got address 0x",
    ),
    "another device": (
        lambda d: torch.ones((M, K), dtype=torch.bfloat16, device="meta"),
        ValueError,
        r"expected device \w+(:0)? \(the device of weight\), got device meta",
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator", TAKES_X)
@pytest.mark.parametrize("case", BAD_X)
def test_x(case: str, operator: str, device: str) -> None:
    make, error, message = BAD_X[case]
    call, x = TAKES_X[operator], make(device)
    with pytest.raises(error, match=rf"^hpc_router_gemm\.{operator}: x: .*{message}"):
        call(x, device)
    call(x_of(device), device)  # the next valid call works


BAD_WEIGHT: dict[str, tuple[Callable[[str], object], type[Exception], str]] = {
    "fp16": (lambda d: torch.ones((N, K), dtype=torch.float16, device=d), TypeError, "torch.float32 or torch.bfloat16"),
    "fp64": (lambda d: torch.ones((N, K), dtype=torch.float64, device=d), TypeError, "got torch.float64"),
    "None": (lambda d: None, TypeError, "expected a torch.Tensor, got NoneType"),
    "one dimension": (lambda d: torch.ones(K, device=d), ValueError, r"expected shape \[N, K\], got shape \[64\]"),
    "no experts": (lambda d: torch.ones((0, K), device=d), ValueError, r"N >= 1\), got shape \[0, 64\]"),
    "K = 12": (lambda d: torch.ones((N, 12), device=d), ValueError, r"positive multiple of 8, got shape \[12, 12\]"),
    "K = 0": (lambda d: torch.ones((N, 0), device=d), ValueError, r"positive multiple of 8, got shape \[12, 0\]"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", BAD_WEIGHT)
def test_weight(case: str, device: str) -> None:
    make, error, message = BAD_WEIGHT[case]
    with pytest.raises(error, match=rf"^hpc_router_gemm\.RouterWeight: weight: .*{message}"):
        RouterWeight(make(device))
    with pytest.raises(error, match=rf"^hpc_router_gemm\.linear: weight: .*{message}"):
        linear(x_of(device), make(device))


@pytest.mark.parametrize("device", DEVICES)
def test_weight_strides_of_linear(device: str) -> None:
    with pytest.raises(ValueError, match=r"linear: weight: expected stride\(0\) to be a multiple of 16 bytes"):
        linear(x_of(device), torch.ones((N, K + 1), device=device)[:, :K])
    with pytest.raises(ValueError, match="linear: weight: expected a 16-byte aligned first element"):
        linear(x_of(device), torch.ones((N, K + 4), device=device)[:, 1 : K + 1])


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        (0, ValueError, r"in \[1, 3\], got 0"),
        (4, ValueError, "got 4"),
        (2.0, TypeError, "an int"),
        (True, TypeError, ""),
    ],
)
def test_terms(terms: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"hpc_router_gemm.RouterWeight: terms: .*{message}"):
        RouterWeight(torch.ones((N, K)), terms)
    with pytest.raises(error, match=f"hpc_router_gemm.linear: terms: .*{message}"):
        linear(x_of("cpu"), torch.ones((N, K)), terms)


@pytest.mark.parametrize(
    ("new", "error", "message"),
    [
        (torch.ones((N, K), dtype=torch.bfloat16), TypeError, "expected dtype torch.float32, got torch.bfloat16"),
        (torch.ones((N + 1, K)), ValueError, r"expected shape \[12, 64\], got shape \[13, 64\]"),
        (torch.ones((K, N)), ValueError, r"expected shape \[12, 64\], got shape \[64, 12\]"),
        (torch.ones((N, K), device="meta"), ValueError, "expected device cpu .the device of weight., got device meta"),
        (3.0, TypeError, "expected a torch.Tensor, got float"),
    ],
)
def test_update(new: object, error: type[Exception], message: str) -> None:
    w = w_of("cpu")
    before = w.weight.clone()
    with pytest.raises(error, match=f"hpc_router_gemm.RouterWeight.update_: new: {message}"):
        w.update_(new)
    assert torch.equal(w.weight, before)


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_where_a_router_weight_belongs(device: str) -> None:
    x, weight = x_of(device), torch.ones((N, K), device=device)
    with pytest.raises(TypeError, match=r"router_gemm: w: expected a RouterWeight \(.*linear.*\), got Tensor"):
        router_gemm(x, weight)
    with pytest.raises(TypeError, match="route: w: expected a RouterWeight"):
        route(x, weight, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (lambda d: torch.ones((M, N), dtype=torch.bfloat16, device=d), TypeError, "expected dtype torch.float32"),
        (lambda d: torch.ones((M, N + 1), device=d), ValueError, r"expected shape \[4, 12\], got shape \[4, 13\]"),
        (lambda d: torch.ones((M, 2 * N), device=d)[:, :N], ValueError, "expected a contiguous tensor"),
        (lambda d: torch.ones((N, M), device=d).T, ValueError, "expected a contiguous tensor"),
        (lambda d: torch.ones((1, N), device=d).expand(M, N), ValueError, "expected a contiguous tensor"),
        (lambda d: torch.ones(99, device=d).as_strided((M, N), (4, 1)), ValueError, "expected a contiguous tensor"),
        (lambda d: torch.ones((M, N), device="meta"), ValueError, "the device of x.*, got device meta"),
        (lambda d: 1, TypeError, "expected a torch.Tensor, got int"),
    ],
)
def test_out(out: Callable[[str], object], error: type[Exception], message: str, device: str) -> None:
    with pytest.raises(error, match=f"hpc_router_gemm.router_gemm: out: .*{message}"):
        router_gemm(x_of(device), w_of(device), out=out(device))


def test_batch_invariant() -> None:
    with pytest.raises(TypeError, match="router_gemm: batch_invariant: expected a bool, got int 1"):
        router_gemm(x_of("cpu"), w_of("cpu"), batch_invariant=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(k=0), ValueError, r"k: expected an int in \[1, 12\], got 0"),
        (dict(k=13), ValueError, r"k: expected an int in \[1, 12\], got 13"),
        (dict(k=2.0), TypeError, "k: expected an int, got float 2.0"),
        (dict(scoring="relu"), ValueError, "scoring: expected 'softmax' or 'sigmoid', got 'relu'"),
        (
            dict(scoring=np.array(["softmax", "relu"])),
            ValueError,
            "scoring: expected 'softmax' or 'sigmoid', got array",
        ),
        (dict(scoring=None), ValueError, "scoring: expected 'softmax' or 'sigmoid', got None"),
        (dict(bias=torch.ones(N, dtype=torch.bfloat16)), TypeError, "bias: expected dtype torch.float32"),
        (dict(bias=torch.ones(N - 1)), ValueError, r"bias: expected shape \[12\], got shape \[11\]"),
        (dict(bias=torch.ones(2 * N)[::2]), ValueError, "bias: expected a contiguous tensor"),
        (dict(bias=torch.ones(N, device="meta")), ValueError, "bias: expected device cpu"),
        (dict(bias=[0.0] * N), TypeError, "bias: expected a torch.Tensor, got list"),
        (dict(num_groups=0), ValueError, "num_groups: "),
        (dict(num_groups=5), ValueError, "num_groups: expected a divisor of the 12 experts .*, got 5"),
        (dict(num_groups=12), ValueError, "num_groups: expected a divisor .* groups of two or more, got 12"),
        (dict(num_groups=4, topk_groups=5), ValueError, r"topk_groups: expected an int in \[1, 4\], got 5"),
        (dict(topk_groups=2), ValueError, r"topk_groups: expected an int in \[1, 1\], got 2"),
        (dict(k=4, num_groups=4), ValueError, "k: expected at most the 3 experts of 1 groups of 3, got 4"),
        (dict(renormalize=1), TypeError, "renormalize: expected a bool, got int 1"),
        (dict(scale="2"), TypeError, "scale: expected a float, got str"),
        (dict(scale=float("nan")), ValueError, "scale: expected a finite float, got nan"),
        (dict(scale=float("-inf")), ValueError, "scale: expected a finite float, got -inf"),
        (dict(scale=10**400), ValueError, "scale: expected a finite float, got 1000"),
    ],
)
def test_route_options(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^hpc_router_gemm.route: {message}"):
        route(x_of("cpu"), w_of("cpu"), **{"k": 2, **options})


# ---- Devices: everything comes from the support table. ----


@pytest.mark.parametrize("row", SUPPORT, ids=lambda row: f"{row.operator}-{row.feature}")
def test_the_table_is_what_is_supported(row, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if row.feature.startswith("bf16") else torch.float32
    assert is_supported(row.operator, device="cpu", weight_dtype=dtype) == row.cpu
    hopper = Capability("cuda:0", "a Hopper GPU", (9, 0), 132, True, "")
    monkeypatch.setattr(common_capability, "capability", lambda device: hopper)
    assert is_supported(row.operator, device="cuda:0", weight_dtype=dtype) == row.cuda
    assert row.cuda or "no GPU kernel yet" in why_not(row.operator, device="cuda:0", weight_dtype=dtype)


def test_another_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Capability("cuda:0", "NVIDIA A100", (8, 0), 108, False, "compute capability 8.0; the kernels need 9.0")
    monkeypatch.setattr(common_capability, "capability", lambda device: other)
    assert why_not("router_gemm", device="cuda:0") == "cuda:0 (NVIDIA A100) has " + other.reason


def test_what_nobody_supports_has_a_reason() -> None:
    assert "no operator 'decode'" in why_not("decode", device="cpu")
    assert "not torch.float16" in why_not("linear", device="cpu", weight_dtype=torch.float16)
    assert "not 4" in why_not("linear", device="cpu", terms=4)
    assert why_not("linear", device="cpu") == ""
    assert "not fp32" in why_not("linear", weight_dtype="fp32")
    with pytest.raises(TypeError, match=r"^hpc_router_gemm.is_supported: operator: expected a str, got list \[1, 2\]"):
        is_supported([1, 2])


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "meta"])
def test_a_device_that_is_not_there_has_a_reason(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for operator in ("router_gemm", "linear", "route"):
        assert not is_supported(operator, device=device)
        assert device in why_not(operator, device=device)
        assert is_supported(operator) and is_supported(operator, device=None)  # no GPU: the CPU


@pytest.mark.gpu
def test_a_gpu_without_the_kernel_is_refused() -> None:
    x, weight = x_of("cuda"), torch.ones((N, K), device="cuda")
    calls = {
        "router_gemm": lambda: router_gemm(x, RouterWeight(weight)),
        "linear": lambda: linear(x, weight),
        "route": lambda: route(x, RouterWeight(weight), 2),
    }
    for operator, call in calls.items():
        if is_supported(operator):
            call()
        else:
            with pytest.raises(ValueError, match=f"{operator}: device: .*no GPU kernel yet; CPU tensors run"):
                call()


@pytest.mark.parametrize(("device", "error"), [("nonsense", ValueError), (3, TypeError), ([1], TypeError)])
def test_what_is_no_device(device: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^hpc_router_gemm.is_supported: device: expected .*, got "):
        is_supported("linear", device=device)
