"""Bad input of fused_moe: ValueError or TypeError that names operator, argument, expected and got, before any work."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hpc_moe
import numpy as np
import pytest
import torch
from hpc_common import capability
from hpc_moe import support

CaseMaker = Callable[..., Any]
E4M3 = torch.float8_e4m3fn


def _bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32).bfloat16()


VALUE, TYPE = ValueError, TypeError
# name -> (kind, change, error, what the message says after "hpc_moe.fused_moe: ")
BAD: dict[str, tuple[str, Callable[[Any], Any], type[Exception], str]] = {
    "x not a tensor": ("bf16", lambda c: c.but(x=[1.0]), TYPE, "x: expected a torch.Tensor, got list"),
    "x fp16": ("block-bf16", lambda c: c.but(x=c.x.half()), TYPE, "x: expected dtype torch.bfloat16 or"),
    "x fp32": ("bf16", lambda c: c.but(x=c.x.float()), TYPE, "x: expected dtype torch.bfloat16, got"),
    "x e4m3 with bf16 weights": ("bf16", lambda c: c.but(x=c.x.to(E4M3)), TYPE, "x: expected dtype torch.bfloat16"),
    "x sparse": (
        "bf16",
        lambda c: c.but(x=c.x.to_sparse()),
        VALUE,
        r"x: expected a dense \(strided\) tensor, got layout",
    ),
    "w2 sparse": ("bf16", lambda c: c.but(w2=c.w2.to_sparse()), VALUE, r"w2: expected a dense \(strided\) tensor, got"),
    "x one-dimensional": ("bf16", lambda c: c.but(x=c.x[0]), VALUE, r"x: expected shape \[T, H\], got shape \[384\]"),
    "H not of 128": ("bf16", lambda c: c.but(x=c.x[:, :320]), VALUE, "x: expected a hidden size H that is a positive"),
    "x column stride": (
        "bf16",
        lambda c: c.but(x=c.x.repeat(1, 2)[:, ::2]),
        VALUE,
        r"x: expected a dense last dimension \(stride 1\), got stride 2",
    ),
    "x row stride": (
        "bf16",
        lambda c: c.but(x=torch.empty(24, 389, dtype=torch.bfloat16)[:, :384]),
        VALUE,
        r"x: expected stride\(0\) to be a multiple of 16 bytes, got 389 elements",
    ),
    "x misaligned": (
        "bf16",
        lambda c: c.but(x=torch.zeros(24, 392, dtype=torch.bfloat16)[:, 1:385]),
        VALUE,
        "x: expected a 16-byte aligned first element",
    ),
    "w13 dtype": ("block-bf16", lambda c: c.but(w13=_bf16(c.w13)), TYPE, "w13: expected dtype torch.float8_e4m3fn"),
    "w13 e4m3 unquantised": ("bf16", lambda c: c.but(w13=c.w13.to(E4M3)), TYPE, "w13: expected dtype torch.bfloat16"),
    "w13 hidden": ("bf16", lambda c: c.but(w13=c.w13[:, :, :256]), VALUE, r"w13: expected shape \[E, 2I, 384\]"),
    "w13 I": ("bf16", lambda c: c.but(w13=c.w13[:, :448]), VALUE, "w13: expected 2I rows with I a positive multiple"),
    "w13 no experts": ("bf16", lambda c: c.but(w13=c.w13[:0]), VALUE, "w13: expected 1 to 512 experts on a rank"),
    "w13 strides": (
        "bf16",
        lambda c: c.but(w13=c.w13.transpose(1, 2).contiguous().transpose(1, 2)),
        VALUE,
        "w13: expected a contiguous tensor, got strides",
    ),
    "w2 dtype": ("block-bf16", lambda c: c.but(w2=_bf16(c.w2)), TYPE, "w2: expected dtype torch.float8_e4m3fn"),
    "w2 shape": ("bf16", lambda c: c.but(w2=c.w2[:, :, :128]), VALUE, r"w2: expected shape \[8, 384, 256\]"),
    "w2 experts": ("bf16", lambda c: c.but(w2=c.w2[:7]), VALUE, r"w2: expected shape \[8, 384, 256\], got shape \[7"),
    "w2 strides": (
        "bf16",
        lambda c: c.but(w2=torch.empty(8, 384, 320, dtype=torch.bfloat16)[:, :, :256]),
        VALUE,
        "w2: expected a contiguous tensor",
    ),
    "ids float": ("bf16", lambda c: c.but(topk_ids=c.topk_ids.float()), TYPE, "topk_ids: expected dtype torch.int32"),
    "ids shape": ("bf16", lambda c: c.but(topk_ids=c.topk_ids[:20]), VALUE, r"topk_ids: expected shape \[24, k\]"),
    "ids k 0": ("bf16", lambda c: c.but(topk_ids=c.topk_ids[:, :0]), VALUE, "topk_ids: expected k from 1 to 32"),
    "ids k 33": (
        "bf16",
        lambda c: c.but(topk_ids=c.topk_ids[:, :1].repeat(1, 33)),
        VALUE,
        "topk_ids: expected k from 1 to 32, got 33",
    ),
    "id too large": (
        "bf16",
        lambda c: c.but(topk_ids=torch.full_like(c.topk_ids, 8)),
        VALUE,
        r"topk_ids: expected ids in \[-1, 8\), got 8 at token 0, slot 0",
    ),
    "id below -1": (
        "bf16",
        lambda c: c.but(topk_ids=torch.full_like(c.topk_ids, -2)),
        VALUE,
        r"topk_ids: expected ids in \[-1, 8\), got -2",
    ),
    "weights dtype": (
        "bf16",
        lambda c: c.but(topk_weights=c.topk_weights.bfloat16()),
        TYPE,
        "topk_weights: expected dtype torch.float32",
    ),
    "weights shape": (
        "bf16",
        lambda c: c.but(topk_weights=c.topk_weights[:, :3]),
        VALUE,
        r"topk_weights: expected shape \[24, 4\], got shape \[24, 3\]",
    ),
    "quant type": (
        "bf16",
        lambda c: c.but(quant="block"),
        TYPE,
        "quant: expected None, Fp8Block or Fp8Tensor, got str",
    ),
    "activation array": ("bf16", lambda c: c.but(activation=np.array(["silu", "gelu"])), VALUE, "activation: expected"),
    "activation": ("bf16", lambda c: c.but(activation="gelu"), VALUE, "activation: expected \"silu\", got 'gelu'"),
    "limit negative": ("bf16", lambda c: c.but(swiglu_limit=-1.0), VALUE, "swiglu_limit: expected a positive finite"),
    "limit zero": ("bf16", lambda c: c.but(swiglu_limit=0), VALUE, "swiglu_limit: expected a positive finite"),
    "limit type": ("bf16", lambda c: c.but(swiglu_limit="7"), TYPE, "swiglu_limit: expected a float, got str"),
    "factor NaN": (
        "bf16",
        lambda c: c.but(routed_scaling_factor=float("nan")),
        VALUE,
        "routed_scaling_factor: expected a finite number, got nan",
    ),
    "rank negative": ("bf16", lambda c: c.but(ep_rank=-1), VALUE, "ep_rank: expected an int in"),
    "rank type": ("bf16", lambda c: c.but(ep_rank=True), TYPE, "ep_rank: expected an int, got bool True"),
    "rank without count": ("bf16", lambda c: c.but(ep_rank=1), VALUE, "num_experts: expected the number of experts"),
    "rank past the experts": (
        "bf16",
        lambda c: c.but(ep_rank=2, num_experts=16),
        VALUE,
        r"num_experts: expected an int in \[24, 65536\], got 16",
    ),
    "batch_invariant type": (
        "bf16",
        lambda c: c.but(batch_invariant=1),
        TYPE,
        "batch_invariant: expected a bool, got int",
    ),
    "shared dtype": (
        "bf16",
        lambda c: c.but(shared_output=c.x.float()),
        TYPE,
        "shared_output: expected dtype torch.bfloat16",
    ),
    "shared shape": (
        "bf16",
        lambda c: c.but(shared_output=c.x[:1]),
        VALUE,
        r"shared_output: expected shape \[24, 384\], got shape \[1, 384\]",
    ),
    "out dtype": (
        "bf16",
        lambda c: c.but(out=c.x.float()),
        TYPE,
        "out: expected dtype torch.bfloat16, got torch.float32",
    ),
    "out shape": ("bf16", lambda c: c.but(out=c.x.clone()[:, :256]), VALUE, r"out: expected shape \[24, 384\]"),
    "out stride": (
        "bf16",
        lambda c: c.but(out=torch.empty(24, 385, dtype=torch.bfloat16)[:, :384]),
        VALUE,
        r"out: expected stride\(0\) to be a multiple of 16 bytes",
    ),
    "workspace type": ("bf16", lambda c: c.but(workspace=4096), TYPE, "workspace: expected a MoeWorkspace or a uint8"),
    "workspace dtype": (
        "bf16",
        lambda c: c.but(workspace=torch.empty(1 << 20)),
        TYPE,
        "workspace: expected dtype torch.uint8",
    ),
    "workspace strides": (
        "bf16",
        lambda c: c.but(workspace=torch.empty(1 << 22, dtype=torch.uint8)[::2]),
        VALUE,
        "workspace: expected a contiguous tensor",
    ),
    "workspace misaligned": (
        "bf16",
        lambda c: c.but(workspace=torch.empty(1 << 22, dtype=torch.uint8)[1:]),
        VALUE,
        "workspace: expected a 16-byte aligned first element",
    ),
    "workspace on another device": (
        "bf16",
        lambda c: c.but(workspace=torch.empty(1 << 22, dtype=torch.uint8, device="meta")),
        VALUE,
        r"workspace: expected device cpu \(the device of x\), got device meta",
    ),
    "w13 on another device": ("bf16", lambda c: c.but(w13=c.w13.to("meta")), VALUE, "w13: expected device cpu"),
    "scale on another device": (
        "block-bf16",
        lambda c: c.scales(w2_scale=c.quant.w2_scale.to("meta")),
        VALUE,
        "quant.w2_scale: expected device cpu",
    ),
    "block w13_scale shape": (
        "block-bf16",
        lambda c: c.scales(w13_scale=c.quant.w13_scale[:, :2].contiguous()),
        VALUE,
        r"quant.w13_scale: expected shape \[8, 4, 3\], got shape \[8, 2, 3\]",
    ),
    "block w2_scale transposed": (
        "block-bf16",
        lambda c: c.scales(w2_scale=c.quant.w2_scale.transpose(1, 2).contiguous()),
        VALUE,
        r"quant.w2_scale: expected shape \[8, 3, 2\], got shape \[8, 2, 3\]",
    ),
    "block w13_scale strides": (
        "block-bf16",
        lambda c: c.scales(w13_scale=c.quant.w13_scale.transpose(1, 2).contiguous().transpose(1, 2)),
        VALUE,
        "quant.w13_scale: expected a contiguous tensor",
    ),
    "block w13_scale dtype": (
        "block-bf16",
        lambda c: c.scales(w13_scale=c.quant.w13_scale.double()),
        TYPE,
        "quant.w13_scale: expected dtype torch.float32",
    ),
    "block x_scale missing": (
        "block-e4m3",
        lambda c: c.scales(x_scale=None),
        VALUE,
        r"quant.x_scale: expected shape \[T, 3\]",
    ),
    "block x_scale with bf16 x": (
        "block-bf16",
        lambda c: c.scales(x_scale=torch.ones(24, 3)),
        VALUE,
        "quant.x_scale: expected None with a bf16 x",
    ),
    "block x_scale shape": (
        "block-e4m3",
        lambda c: c.scales(x_scale=c.quant.x_scale[:, :2]),
        VALUE,
        r"quant.x_scale: expected shape \[24, 3\]",
    ),
    "tensor w13_scale shape": (
        "tensor-bf16",
        lambda c: c.scales(w13_scale=c.quant.w13_scale[:4]),
        VALUE,
        r"quant.w13_scale: expected shape \[8\], got shape \[4\]",
    ),
    "tensor act_scale missing": (
        "tensor-bf16",
        lambda c: c.scales(act_scale=None),
        TYPE,
        "quant.act_scale: expected a torch.Tensor, got NoneType",
    ),
    "tensor x_scale a float": (
        "tensor-e4m3",
        lambda c: c.scales(x_scale=0.5),
        TYPE,
        "quant.x_scale: expected a torch.Tensor",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_the_next_call_works(name: str, moe_case: CaseMaker) -> None:
    kind, change, error, message = BAD[name]
    case = moe_case(kind)
    want = case.run()
    out = torch.full_like(want, 7.0)
    bad = change(case)
    if "out" not in bad.options:
        bad = bad.but(out=out)
    with pytest.raises(error, match=f"^hpc_moe.fused_moe: {message}"):
        bad.run()
    assert (out == 7).all()
    assert case.run().equal(want)


@pytest.mark.parametrize("tokens", [1, 24, 200])
def test_a_workspace_one_byte_too_small(kind: tuple[str, str], tokens: int, moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=tokens)
    config = hpc_moe._C.make_config(
        num_tokens=tokens, top_k=4, num_local_experts=8, num_experts=8, hidden=384, intermediate=256,
        quant=hpc_moe.quant.quant_name(case.quant), x_is_bf16=case.x.dtype == torch.bfloat16,
        num_sms=capability.capability(case.x.device).num_sms,
    )  # fmt: skip
    need = config.layout.bytes
    buffer = torch.empty(need, dtype=torch.uint8, device=case.x.device)
    with pytest.raises(ValueError, match=f"workspace: expected at least {need} bytes, got {need - 1}"):
        case.run(workspace=buffer[:-1])
    assert case.run(workspace=buffer).equal(case.run())


def test_a_workspace_made_for_fewer_tokens(moe_case: CaseMaker) -> None:
    workspace = hpc_moe.MoeWorkspace(16, 4, 8, 384, 256, device="cpu")
    with pytest.raises(ValueError, match="workspace: expected at least"):
        moe_case("block-bf16", tokens=40).run(workspace=workspace)
    case = moe_case("block-bf16", tokens=16)
    case.check(case.run(workspace=workspace))


OVERLAPPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: torch.zeros_like(x[:1]).expand(x.shape),
    "a window": lambda x: torch.zeros_like(x).as_strided(x.shape, (128, 1)),
    "one row less": lambda x: torch.zeros_like(x).as_strided(x.shape, (x.shape[1] - 8, 1)),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_out_with_overlapping_rows(moe_case: CaseMaker, kind: Any, name: str) -> None:
    case = moe_case(kind)
    out = OVERLAPPING[name](case.x.bfloat16())
    with pytest.raises(ValueError, match="^hpc_moe.fused_moe: out: expected rows that do not overlap .* got stride "):
        case.run(out=out)
    assert not out.any()
    case.check(case.run(shared_output=out), case.but(shared_output=out).want())  # what is read may overlap
    one = case.tokens(slice(0, 1))
    assert torch.equal(one.run(out=out[:1]), one.run())  # a single row has nothing to overlap


@pytest.mark.parametrize("name", ["swiglu_limit", "routed_scaling_factor"])
def test_an_int_that_no_float_holds(moe_case: CaseMaker, name: str) -> None:
    with pytest.raises(ValueError, match=f"^hpc_moe.fused_moe: {name}: expected a .*finite number, got 1000"):
        moe_case("bf16").run(**{name: 10**400})


HOPPER = capability.Capability("cuda:0", "NVIDIA H200", (9, 0), 132, True, "")
AMPERE = replace(
    HOPPER, name="NVIDIA A100", compute=(8, 0), usable=False, reason="compute capability 8.0; the kernels need 9.0"
)


@pytest.mark.parametrize("row", support.SUPPORT, ids=lambda row: row.feature)
def test_a_gpu_is_refused_by_the_table_alone(row: capability.Support, monkeypatch: pytest.MonkeyPatch) -> None:
    quant = {"block FP8": "block", "per-tensor FP8": "tensor", "bf16 weights": "none"}[row.feature.split(",")[0]]
    x_dtype = E4M3 if "e4m3 x" in row.feature else torch.bfloat16
    assert support.feature(quant, x_dtype) == row.feature
    monkeypatch.setattr(capability, "capability", lambda device: AMPERE)
    with pytest.raises(ValueError, match=r"fused_moe: device: expected one that runs fused_moe .* A100.* 8.0"):
        support.require_supported("hpc_moe.fused_moe", quant, x_dtype, torch.device("cuda:0"))
    monkeypatch.setattr(capability, "capability", lambda device: HOPPER)
    if row.cuda:
        support.require_supported("hpc_moe.fused_moe", quant, x_dtype, torch.device("cuda:0"))
    else:
        with pytest.raises(ValueError, match="no GPU kernel yet"):
            support.require_supported("hpc_moe.fused_moe", quant, x_dtype, torch.device("cuda:0"))
