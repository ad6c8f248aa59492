"""torch.compile, torch.library.opcheck and fake tensors."""

import pytest
import torch
from hpc_attention import DecodePlan, decode, prefill
from hpc_attention.support import FP8
from hpc_attention.testing import Problem, devices
from hpc_common.reference import attention as reference
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("one_thread")
BF16 = torch.bfloat16
ALL_OPTIONS = dict(
    lengths=(257, 70), num_q_heads=8, num_kv_heads=2, head_dim=64, window=100, softcap=8.0, sinks=True, k_scale="token",
    v_scale="head",
)  # fmt: skip
# opcheck compares inputs before and after with torch.allclose, which has no e4m3.
UTILS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def operator_arguments(inputs, out, lse, **scales) -> tuple:
    """Arguments of the registered operator for a plan without options."""
    plan, cache = inputs.plan, inputs.cache
    plan.workspace.zero_()  # opcheck compares mutated arguments, and NaN equals nothing
    return (
        inputs.q, cache.k_cache, cache.v_cache, cache.page_table, plan.map, plan.workspace, out, lse,
        scales.get("q_scale"), scales.get("k_scale"), scales.get("v_scale"), None, 1.0, 1.0, 0.125, 0.0, plan.q_len, 0,
        plan.num_ctas, plan.max_batch, plan.max_seq_len, plan.batch_invariant,
    )  # fmt: skip


@pytest.mark.parametrize("device", devices(Problem(**ALL_OPTIONS), Problem(**ALL_OPTIONS, kv_dtype=FP8)))
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_decode_compiles_as_one_graph(device: str, kv_dtype: torch.dtype) -> None:
    """With the plan as an argument, every option used, and ``out`` given or not; the same bits as the eager call."""
    torch._dynamo.reset()
    inputs = Problem(**ALL_OPTIONS, kv_dtype=kv_dtype).make(device)
    out, lse = inputs.run()
    inputs.check(out, lse)
    backend = "aot_eager" if device == "cpu" else "inductor"  # no C++ compiler is needed to test
    compiled = torch.compile(decode, fullgraph=True, backend=backend)

    def call(**changes):
        cache = inputs.cache
        arguments = (inputs.q, cache.k_cache, cache.v_cache, cache.page_table, inputs.plan)
        return compiled(*arguments, **inputs.options, return_lse=True, **changes)

    again, again_lse = call()
    assert torch.equal(again, out) and torch.equal(again_lse, lse)
    given = torch.full_like(out, float("nan"))
    result, _ = call(out=given)
    assert torch.equal(given, out) and torch.equal(result, out)


@pytest.mark.parametrize("device", devices(Problem()))
def test_a_layer_with_its_plan_closed_over(device: str) -> None:
    """A plan updated between calls of the compiled layer is followed without a new compilation."""
    torch._dynamo.reset()
    problem = Problem((300, 64), head_dim=64)
    inputs = problem.make(device)
    plan, cache = inputs.plan, inputs.cache
    compilations = 0

    def backend(graph, _):
        nonlocal compilations
        compilations += 1
        return graph

    @torch.compile(fullgraph=True, backend=backend)
    def layer(q, k_cache, v_cache, page_table):
        return decode(q * 1.0, k_cache, v_cache, page_table, plan) + 0.0

    for lengths in ([300, 64], [17, 1], [0, 63]):
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        plan.update(seq_lens)
        out = layer(inputs.q, cache.k_cache, cache.v_cache, cache.page_table)
        want, _ = reference.decode(inputs.q, cache.k_cache, cache.v_cache, cache.page_table, lengths)
        torch.testing.assert_close(out.cpu().to(torch.float64), want, rtol=2.0**-7, atol=2.0**-9)
    assert compilations == 1


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("device", devices(Problem(head_dim=64), Problem(head_dim=64, kv_dtype=FP8)))
def test_opcheck_decode(device: str, with_lse: bool) -> None:
    op = torch.ops.hpc_attention.decode.default
    inputs = Problem((200, 0, 64), num_kv_heads=2, head_dim=64, num_ctas=2).make(device)
    lse = torch.zeros(inputs.q.shape[:2], device=device) if with_lse else None
    torch.library.opcheck(op, operator_arguments(inputs, torch.zeros_like(inputs.q), lse))
    inputs = Problem((200, 5), head_dim=64, kv_dtype=FP8, k_scale="token", num_ctas=2).make(device)
    scale = inputs.options["k_scale"].nan_to_num(1.0)
    arguments = operator_arguments(inputs, torch.zeros_like(inputs.q), lse if lse is None else lse[:2], k_scale=scale)
    torch.library.opcheck(op, arguments, test_utils=UTILS)


def test_opcheck_prefill() -> None:
    inputs = Problem((200, 5), num_kv_heads=2, head_dim=64).make()
    cache = inputs.cache
    q = torch.randn(7, 8, 64).to(BF16)
    starts = torch.tensor([0, 6, 7], dtype=torch.int32)
    arguments = (
        q, cache.k_cache.nan_to_num(), cache.v_cache.nan_to_num(), cache.page_table, starts, cache.seq_lens,
        torch.zeros_like(q), torch.zeros(7, 8), None, None, None, 1.0, 1.0, 0.125, 0.0, 0, 6,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.hpc_attention.prefill.default, arguments)


def test_prefill_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    inputs = Problem((200, 5), num_kv_heads=2, head_dim=64, kv_dtype=FP8).make()
    q = torch.randn(7, 8, 64).to(BF16)
    cache, starts = inputs.cache, torch.tensor([0, 6, 7], dtype=torch.int32)
    arguments = (q, cache.k_cache, cache.v_cache, cache.page_table, starts, cache.seq_lens, 6)
    options = dict(window=50, softcap=4.0, sinks=torch.ones(8), k_scale=0.5, return_lse=True)
    out, lse = prefill(*arguments, **options)
    again, again_lse = torch.compile(prefill, fullgraph=True, backend="aot_eager")(*arguments, **options)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)


def test_prefill_compiles_with_dynamic_sizes_into_out() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(prefill, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((130, 70), (130, 70, 5), (1, 2, 3, 4, 5)):
        inputs = Problem(lengths, num_q_heads=4, num_kv_heads=2, head_dim=64).make()
        cache, out = inputs.cache, torch.empty_like(inputs.q)
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
        arguments = (inputs.q, cache.k_cache, cache.v_cache, cache.page_table, starts, cache.seq_lens, 1)
        _, lse = compiled(*arguments, out=out, return_lse=True, sm_scale=0.125)
        inputs.check(out, lse)  # one new token a request: the same as decode


@pytest.mark.parametrize(("q_dtype", "out_dtype"), [(BF16, BF16), (torch.float16, torch.float16), (FP8, BF16)])
def test_fake_tensors(q_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Shapes, dtypes and checks without memory, as a compiler sees them."""
    plan = DecodePlan(
        max_batch=4, num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=16, q_len=2, kv_dtype=FP8, device="cpu"
    )
    plan.update(torch.tensor([3, 4, 5], dtype=torch.int32))
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(6, 8, 64).to(q_dtype)
        cache = torch.empty(10, 16, 2, 64).to(FP8)
        table = torch.empty(3, 2, dtype=torch.int32)
        q_scale = torch.empty(6, 8) if q_dtype == FP8 else None
        out, lse = decode(q, cache, cache, table, plan, q_scale=q_scale, return_lse=True)
        assert out.shape == q.shape and out.dtype == out_dtype
        assert lse.shape == (6, 8) and lse.dtype == torch.float32
        with pytest.raises(ValueError, match=r"page_table: expected shape \[3, max_pages\]"):
            decode(q, cache, cache, table[:2], plan, q_scale=q_scale)
