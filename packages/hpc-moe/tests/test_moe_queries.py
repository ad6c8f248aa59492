"""Bad input of what surrounds fused_moe: the workspace's size, the quantisers, what is supported."""

from collections.abc import Callable
from typing import Any

import hpc_moe
import pytest
import torch

E4M3 = torch.float8_e4m3fn
VALUE, TYPE = ValueError, TypeError
SIZES = dict(max_tokens=8, top_k=2, num_local_experts=8, hidden=256, intermediate=128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": -1}, "max_tokens: expected an int in"),
        ({"max_tokens": 262145}, "max_tokens: expected an int in"),
        ({"top_k": 33}, r"top_k: expected an int in \[1, 32\], got 33"),
        ({"num_local_experts": 513}, r"num_local_experts: expected an int in \[1, 512\], got 513"),
        ({"num_experts": 4}, r"num_experts: expected an int in \[8, 65536\], got 4"),
        ({"hidden": 100}, "hidden: expected an int in"),
        ({"hidden": 320}, "hidden: expected a multiple of 128, got 320"),
        ({"intermediate": 96}, "intermediate: expected a multiple of 64, got 96"),
        ({"intermediate": 2**17 + 64}, r"intermediate: expected an int in \[64, 131072\]"),
        ({"quant": "int8"}, "quant: expected none, block or tensor, got 'int8'"),
        ({"x_dtype": torch.float16}, "x_dtype: expected torch.bfloat16 or torch.float8_e4m3fn, got torch.float16"),
        ({"quant": "none", "x_dtype": E4M3}, "x_dtype: expected torch.bfloat16, got torch.float8_e4m3fn"),
    ],
)
def test_workspace_query_out_of_range(change: dict[str, Any], message: str) -> None:
    for query in (hpc_moe.workspace_bytes, hpc_moe.MoeWorkspace):
        with pytest.raises(ValueError, match="^hpc_moe.workspace_bytes: " + message):
            query(**{**SIZES, **change})


@pytest.mark.parametrize("value", [1.5, "x", True, None])
@pytest.mark.parametrize(
    "name", ["max_tokens", "top_k", "num_local_experts", "num_experts", "hidden", "intermediate", "batch_invariant"]
)
def test_workspace_query_types(name: str, value: object) -> None:
    if (name, value) in (("num_experts", None), ("batch_invariant", True)):
        assert hpc_moe.workspace_bytes(**{**SIZES, name: value}) > 0
        return
    expected = "a bool" if name == "batch_invariant" else "an int"
    message = f"^hpc_moe.workspace_bytes: {name}: expected {expected}, got {type(value).__name__} "
    with pytest.raises(TypeError, match=message):
        hpc_moe.workspace_bytes(**{**SIZES, name: value})


def test_workspace_query_takes_dtypes_only() -> None:
    with pytest.raises(TypeError, match="^hpc_moe.workspace_bytes: x_dtype: expected a torch.dtype, got str 'bf16'"):
        hpc_moe.workspace_bytes(**SIZES, x_dtype="bf16")


def test_workspace_query_takes_the_ends_of_its_ranges() -> None:
    """Its ranges are the planner's."""
    for change in ({"max_tokens": 262144}, {"top_k": 32}, {"num_local_experts": 512}, {"num_experts": 2**16}):
        assert hpc_moe.workspace_bytes(**{**SIZES, **change}) > 0
    assert hpc_moe.workspace_bytes(**{**SIZES, "hidden": 2**17, "intermediate": 2**17}) > 0
    for name, value in (("top_k", 33), ("num_local_experts", 513), ("hidden", 2**17 + 128)):
        problem = dict(num_tokens=8, top_k=2, num_local_experts=8, num_experts=2**10, hidden=256, intermediate=128)
        with pytest.raises(ValueError, match=f"{name}: expected an int in"):
            hpc_moe._C.max_workspace_bytes(
                **{**problem, name: value}, quant="block", x_is_bf16=True, batch_invariant=False
            )


def test_quantisers_refuse_partial_blocks() -> None:
    with pytest.raises(ValueError, match="quantize_groups: values: expected a multiple of 128 columns, got 100"):
        hpc_moe.quantize_groups(torch.ones(2, 100), 128)
    with pytest.raises(ValueError, match="quantize_weight: weight: expected multiples of 128 x 128"):
        hpc_moe.quantize_weight(torch.ones(1, 192, 128), 128, 128)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: hpc_moe.quantize_weight(None, 128, 128),
            TYPE,
            "weight: weight: expected a torch.Tensor, got NoneType",
        ),
        (
            lambda: hpc_moe.quantize_weight(torch.ones(128, 128), 128, 128),
            VALUE,
            r"weight: weight: expected shape \[E, ",
        ),
        (
            lambda: hpc_moe.quantize_weight(torch.ones(1, 128, 128), 0, 128),
            VALUE,
            "weight: block_rows: expected an int in",
        ),
        (
            lambda: hpc_moe.quantize_weight(torch.ones(1, 8, 8), 8, "8"),
            TYPE,
            "weight: block_columns: expected an int, got",
        ),
        (lambda: hpc_moe.quantize_groups([1.0], 1), TYPE, "groups: values: expected a torch.Tensor, got list"),
        (lambda: hpc_moe.quantize_groups(torch.ones(2, 8).int(), 8), TYPE, "groups: values: expected a floating-point"),
        (lambda: hpc_moe.quantize_groups(torch.ones(8), 8), VALUE, r"groups: values: expected shape \[rows, n\]"),
        (lambda: hpc_moe.quantize_groups(torch.ones(2, 8), 0), VALUE, "groups: group: expected an int in"),
        (
            lambda: hpc_moe.quantize_static(torch.ones(2), 1.0),
            TYPE,
            "static: scale: expected a torch.Tensor, got float",
        ),
        (
            lambda: hpc_moe.quantize_static(None, torch.ones(1)),
            TYPE,
            "static: values: expected a torch.Tensor, got None",
        ),
    ],
)
def test_quantisers_refuse_other_types(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="^hpc_moe.quantize_" + message):
        call()


def test_is_supported() -> None:
    for quant in ("none", "block", "tensor"):
        assert hpc_moe.is_supported(quant, device="cpu") and hpc_moe.why_not(quant, device="cpu") == ""
    assert hpc_moe.is_supported("block", E4M3, "cpu")
    with pytest.raises(ValueError, match="quant: expected none, block or tensor, got 'fp4'"):
        hpc_moe.is_supported("fp4")
    with pytest.raises(ValueError, match="x_dtype: expected torch.bfloat16, got torch.float8_e4m3fn"):
        hpc_moe.is_supported("none", E4M3)
    with pytest.raises(TypeError, match="x_dtype: expected a torch.dtype, got str 'bf16'"):
        hpc_moe.is_supported("none", "bf16")


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "meta"])
def test_a_device_that_is_not_there_has_a_reason(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for quant in ("none", "block", "tensor"):
        assert not hpc_moe.is_supported(quant, device=device)
        assert device in hpc_moe.why_not(quant, device=device)
        assert hpc_moe.is_supported(quant) and hpc_moe.is_supported(quant, device=None)  # no GPU: the CPU
    assert hpc_moe.MoeWorkspace(**SIZES).buffer.device.type == "cpu"


@pytest.mark.parametrize(("device", "error"), [("nonsense", ValueError), (3, TypeError), ([1], TypeError)])
def test_what_is_no_device(device: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^hpc_moe.is_supported: device: expected .*, got "):
        hpc_moe.is_supported(device=device)
    with pytest.raises(error, match=r"^hpc_moe.MoeWorkspace: device: expected .*, got "):
        hpc_moe.MoeWorkspace(**SIZES, device=device)
