"""fused_moe under torch.compile, fake tensors and opcheck."""

from collections.abc import Callable
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_common.poison import bits
from torch._subclasses.fake_tensor import FakeTensorMode

CaseMaker = Callable[..., Any]


def op_arguments(case: Any, workspace: torch.Tensor | None, shared: torch.Tensor | None) -> tuple[Any, ...]:
    """The arguments of torch.ops.hpc_moe.fused_moe for a case."""
    quant, name = case.quant, hpc_moe.quant.quant_name(case.quant)
    scales = [getattr(quant, field, None) for field in ("w13_scale", "w2_scale", "x_scale", "act_scale")]
    out = torch.zeros(case.x.shape, dtype=torch.bfloat16, device=case.x.device)
    tensors = (case.x, case.w13, case.w2, case.topk_ids, case.topk_weights)
    return (*tensors, *scales, name, 0, 8, 7.0, shared, 1.5, False, workspace, out)


@pytest.mark.kinds("block-bf16", "tensor-e4m3", "bf16")
@pytest.mark.parametrize("with_workspace", [False, True])
def test_opcheck(kind: tuple[str, str], with_workspace: bool, moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=7, hidden=128, inter=64)
    device = case.x.device
    workspace = torch.zeros(1 << 18, dtype=torch.uint8, device=device) if with_workspace else None
    shared = torch.ones(case.x.shape, dtype=torch.bfloat16, device=device) if with_workspace else None
    # test_schema compares every input by allclose, which torch has not for e4m3; the next test does it by bytes.
    names = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    tests = names if case.quant is None else names[1:]
    arguments = op_arguments(case, workspace, shared)
    torch.library.opcheck(torch.ops.hpc_moe.fused_moe.default, arguments, test_utils=tests)


def test_only_workspace_and_out_are_written(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=7, hidden=128, inter=64)
    workspace = torch.zeros(1 << 18, dtype=torch.uint8, device=case.x.device)
    arguments = op_arguments(case, workspace, torch.ones(7, 128, dtype=torch.bfloat16, device=case.x.device))
    before = [bits(each).clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    torch.ops.hpc_moe.fused_moe(*arguments)
    changed = [
        index
        for index, (old, new) in enumerate(zip(before, arguments, strict=True))
        if isinstance(new, torch.Tensor) and not old.equal(bits(new))
    ]
    assert changed == [len(arguments) - 2, len(arguments) - 1]


def test_the_schema_marks_what_is_mutated() -> None:
    arguments = torch.ops.hpc_moe.fused_moe.default._schema.arguments
    written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    assert written == {"workspace", "out"}


def test_the_op_equals_the_public_call(kind: tuple[str, str], moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=7)
    arguments = op_arguments(case, None, None)
    torch.ops.hpc_moe.fused_moe(*arguments)
    assert arguments[-1].equal(case.run(swiglu_limit=7.0, routed_scaling_factor=1.5))


@pytest.mark.kinds("block-e4m3", "tensor-bf16", "bf16")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(kind: tuple[str, str], dynamic: bool, moe_case: CaseMaker) -> None:
    """The same bits compiled, between other operators, with a preallocated workspace, and with another batch."""
    torch._dynamo.reset()
    case = moe_case(kind, hidden=128, inter=64)
    workspace = hpc_moe.MoeWorkspace(64, 4, 8, 128, 64, hpc_moe.quant.quant_name(case.quant), device=case.x.device)

    def layer(case_x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, quant: Any) -> torch.Tensor:
        y = hpc_moe.fused_moe(
            case_x, case.w13, case.w2, ids, weights, quant, workspace=workspace, routed_scaling_factor=0.5
        )
        return hpc_moe.fused_moe(case_x, case.w13, case.w2, ids, weights, quant, shared_output=y) * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (24, 11, 17):
        some = case.tokens(slice(0, tokens))
        arguments = (some.x, some.topk_ids, some.topk_weights, some.quant)
        assert compiled(*arguments).equal(layer(*arguments))


def test_compile_with_inductor(moe_case: CaseMaker) -> None:
    """quant made inside the compiled function, out given by the caller; nothing else, so no C++ is generated."""
    torch._dynamo.reset()
    case = moe_case("block-bf16", hidden=128, inter=64)
    scales = (case.quant.w13_scale, case.quant.w2_scale)

    def layer(x: torch.Tensor, out: torch.Tensor) -> None:
        hpc_moe.fused_moe(x, case.w13, case.w2, case.topk_ids, case.topk_weights, hpc_moe.Fp8Block(*scales), out=out)

    have = torch.empty_like(case.x)
    torch.compile(layer, fullgraph=True)(case.x, have)
    assert have.equal(case.run())


def test_bad_input_raises_while_compiling(moe_case: CaseMaker) -> None:
    torch._dynamo.reset()
    case = moe_case("bf16")
    with pytest.raises(Exception, match="activation: expected"):
        torch.compile(case.run, fullgraph=True, backend="eager")(activation="gelu")


@pytest.mark.parametrize("tokens", [0, 24])
def test_fake_tensors(kind: tuple[str, str], tokens: int, moe_case: CaseMaker) -> None:
    case = moe_case(kind, tokens=tokens)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        names = ("x", "w13", "w2", "topk_ids", "topk_weights")
        fake = case.but(**{name: mode.from_tensor(getattr(case, name)) for name in names})
        result = fake.run()
    assert result.shape == (tokens, 384) and result.dtype == torch.bfloat16 and result.device == case.x.device


def test_inference_mode_and_weights_that_require_grad(moe_case: CaseMaker) -> None:
    case = moe_case("bf16")
    want = case.run()
    with torch.inference_mode():
        assert case.run().equal(want)
    with torch.no_grad():
        assert case.but(w13=torch.nn.Parameter(case.w13)).run().equal(want)
