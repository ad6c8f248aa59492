"""Norms that quantise their rows: values, which calls they take, and who reads the rows."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_moe.quant import quantize_groups
from hpc_sglang.counters import calls
from hpc_sglang.early import early_start
from hpc_sglang.moe import MoeHooks, norm, rows
from hpc_sglang.moe.experts import Experts
from hpc_sglang.record import Record

EPSILON = 1e-3
SHAPES = [(1, 256), (3, 640), (4, 2048), (70, 5120)]


def problem(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """x, residual, weight; the sum of a row in the middle is zero."""
    source = torch.Generator().manual_seed(0)
    x = (torch.randn((tokens, hidden), generator=source) * 3).to(dtype)
    residual = torch.randn((tokens, hidden), generator=source).to(dtype)
    x[tokens // 2], residual[tokens // 2] = (0, 0) if tokens > 2 else (x[0], residual[0])
    return x, residual, (0.5 + torch.rand(hidden, generator=source)).to(dtype)


def check(given: tuple[torch.Tensor, ...], x: torch.Tensor, residual: torch.Tensor) -> None:
    """What became of x and the residual, by the formula in float64."""
    total = given[0].double() + given[1].double()
    want = total * (total.square().mean(1, keepdim=True) + EPSILON).rsqrt() * given[2].double()
    eps = torch.finfo(x.dtype).eps
    assert ((residual.cpu().double() - total).abs() <= eps * total.abs()).all()
    assert ((x.cpu().double() - want).abs() <= eps * want.abs()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, int]) -> None:
    given = problem(*shape)
    x, residual, weight = (value.cuda() for value in given)
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.full((shape[0], shape[1] // 128), torch.nan, device="cuda")
    norm.run(x, residual, weight, EPSILON, values, scales)
    check(given, x, residual)
    want, want_scales = quantize_groups(x, 128)
    assert torch.equal(scales, want_scales) and torch.equal(values.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64])
def test_experts_say_the_same_in_a_graph(tokens: int) -> None:
    """The norm starts its successor early; the experts still read whole rows, at every replay."""
    experts, hidden, inner = 8, 512, 256
    source = torch.Generator("cuda").manual_seed(1)
    w13, w2 = (
        torch.randn(shape, generator=source, device="cuda").to(torch.float8_e4m3fn)
        for shape in ((experts, 2 * inner, hidden), (experts, hidden, inner))
    )
    scales = [torch.full((experts, rows, columns), 0.05, device="cuda") for rows, columns in ((4, 4), (4, 2))]
    ids = torch.arange(2 * tokens, dtype=torch.int32, device="cuda").view(tokens, 2) % experts
    weights = torch.rand(ids.shape, generator=source, device="cuda")
    given = problem(tokens, hidden)
    weight = given[2].cuda()
    x, residual = torch.empty_like(given[0], device="cuda"), torch.empty_like(given[1], device="cuda")

    def step() -> torch.Tensor:
        values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        row_scales = torch.empty((tokens, hidden // 128), device="cuda")
        norm.run(x, residual, weight, EPSILON, values, row_scales)
        return hpc_moe.fused_moe(values, w13, w2, ids, weights, hpc_moe.Fp8Block(*scales, row_scales))

    x.copy_(given[0]), residual.copy_(given[1])
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for factor in (1, -2):
        x.copy_(given[0] * factor), residual.copy_(given[1])
        graph.replay()
        want = hpc_moe.fused_moe(x, w13, w2, ids, weights, hpc_moe.Fp8Block(*scales))
        assert torch.equal(out, want) and out.float().abs().max() > 0


INTERPRETED = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import test_sglang_norm as tests
for shape in tests.SHAPES[:3]:
    given = tests.problem(*shape, torch.float16)
    x, residual = given[0].clone(), given[1].clone()
    values, scales = torch.empty(shape, dtype=torch.float16), torch.empty(shape[0], shape[1] // 128)
    tests.norm.run(x, residual, given[2], tests.EPSILON, values, scales)
    tests.check(given, x, residual)
    _, want = tests.quantize_groups(x, 128)
    assert torch.equal(scales, want), (scales, want)
    spread = scales.repeat_interleave(128, 1)
    back = (values.float() * spread - x.float()).abs()
    assert (back <= 2**-10 * x.float().abs()).all() and values.abs().max() == 448
print("checked")
"""


def test_kernel_values_in_tritons_interpreter(interpreted: Callable[[str], None]) -> None:
    """In fp16, "quantised" rows too: the interpreter rounds to neither bf16 nor FP8 as a GPU does."""
    interpreted(INTERPRETED)


class RMSNorm(torch.nn.Module):
    """SGLang's as far as it is read; its own forward says so."""

    variance_epsilon, variance_size_override = EPSILON, None
    cast_x_before_out_mul = fp32_residual = False

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16))

    def forward(self, *given: Any, **named: Any) -> str:
        return "SGLang's"


def experts_of(hidden: int = 256, block: bool = True, batch_invariant: bool = False) -> Experts:
    layer = SimpleNamespace(
        moe_runner_config=None, w2_weight=torch.empty(4, hidden, 128),
        w13_weight_scale_inv=torch.ones(1), w2_weight_scale_inv=torch.ones(1),
    )  # fmt: skip
    method = SimpleNamespace(block_quant=block, quant_config=SimpleNamespace(weight_block_size=[128, 128]))
    return Experts(layer, method, batch_invariant)


def triton_w8a8_block_fp8_linear() -> None:
    """Of SGLang's name."""


def model_of(experts: Experts | None, linear: Any = triton_w8a8_block_fp8_linear, **changes: Any) -> Any:
    """A model of one of SGLang's Qwen3MoeDecoderLayer, as far as it is read, and something else."""

    class Qwen3MoeDecoderLayer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = RMSNorm(256), RMSNorm(256)
            self.self_attn = torch.nn.Module()
            self.self_attn.qkv_proj = torch.nn.Module()
            config = SimpleNamespace(weight_block_size=[128, 128])
            self.self_attn.qkv_proj.quant_method = SimpleNamespace(w8a8_block_fp8_linear=linear, quant_config=config)
            self.mlp = torch.nn.Module()
            self.mlp.experts = torch.nn.Module()
            self.mlp.experts.hpc_experts = experts

    Qwen3MoeDecoderLayer.__module__ = "sglang.srt.models.qwen3_moe"
    layer = Qwen3MoeDecoderLayer()
    for name, value in changes.items():
        setattr(layer.input_layernorm, name, value)
        setattr(layer.post_attention_layernorm, name, value)
    return torch.nn.Sequential(layer, torch.nn.Linear(1, 1))


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, without the kernel: x becomes 7, and what is quantised has 2 for scales."""

    def run(x: torch.Tensor, residual: torch.Tensor, weight: Any, epsilon: Any, values: Any, scales: Any) -> None:
        x.fill_(7)
        scales.fill_(2)

    monkeypatch.setattr(norm, "run", run)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def zeros(tokens: int = 4) -> torch.Tensor:
    return torch.zeros(tokens, 256, dtype=torch.bfloat16)


def called(experts: Experts, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, Any]:
    """What hpc_moe gets as x and its scales in a call with x."""
    seen: list[Any] = []
    monkeypatch.setattr(experts, "_call", lambda x, ids, weights, workspace, scale=None: seen.append((x, scale)))
    topk = SimpleNamespace(topk_ids=torch.zeros(len(x), 2, dtype=torch.int32), topk_weights=torch.ones(len(x), 2))
    experts.run(x, topk, SimpleNamespace(get=lambda *given: None))
    return seen[0]


def test_experts_get_the_rows_of_their_own_norm_once(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of()
    model = model_of(experts)
    assert norm.install(model, linear=False) == (1, 0)
    x, residual, before = zeros(), zeros(), calls["moe.quantised"]
    out, sum_ = model[0].post_attention_layernorm(x, residual)
    assert out is x and sum_ is residual and (x == 7).all()
    values, scales = called(experts, out.view(-1, 256), monkeypatch)
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape and calls["moe.quantised"] == before + 1
    assert scales.shape == (4, 2) and (scales == 2).all()
    assert experts.quant(scales).x_scale is scales and experts.quant().x_scale is None
    assert called(experts, out, monkeypatch) == (out, None)  # a second call quantises again


@pytest.mark.parametrize("other", ["copy", "part", "later", "rest"])
def test_other_rows_are_not_taken_for_them(other: str, on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of()
    model = model_of(experts)
    norm.install(model, linear=True)
    module = model[0].post_attention_layernorm
    x, _ = module(zeros(), zeros())
    if other == "later":  # a step that is SGLang's in between, whose rows may lie where these did
        assert module(zeros(norm.MOST_ROWS + 1), zeros(norm.MOST_ROWS + 1)) == "SGLang's"
    if other == "rest":  # a call with other rows leaves none
        called(experts, x.clone(), monkeypatch)
    seen = {"copy": x.clone(), "part": x[:3], "later": x, "rest": x}[other]
    got, scale = called(experts, seen, monkeypatch)
    assert got is seen and scale is None


def sglangs_own(x: torch.Tensor, group_size: int, *given: Any, **named: Any) -> str:
    return "SGLang's"


def test_a_projection_gets_the_rows_of_the_norm_before_it(on_a_cpu: None) -> None:
    experts = experts_of()
    model = model_of(experts)
    assert norm.install(model, linear=True) == (1, 1)
    first, second = model[0].input_layernorm, model[0].post_attention_layernorm
    x, _ = first(zeros(), zeros(), None)
    assert experts.rows.take(x) is None
    assert norm.quantise(sglangs_own, x.clone(), 128) == "SGLang's"
    assert norm.quantise(sglangs_own, x, 64) == norm.quantise(sglangs_own, x, 128, 1e-6) == "SGLang's"
    assert norm.quantise(sglangs_own, x, 128, column_major_scales=True) == "SGLang's"
    values, scales = norm.quantise(sglangs_own, x, 128, column_major_scales=False)
    assert values.dtype == torch.float8_e4m3fn and (scales == 2).all()
    assert norm.quantise(sglangs_own, x, 128) == "SGLang's"
    x, _ = first(zeros(), zeros())
    second(zeros(), zeros())  # nobody came for x; it may be another tensor's memory later
    assert norm.quantise(sglangs_own, x, 128) == "SGLang's"


def test_norms_in_front_of_other_projections_stay_sglangs(on_a_cpu: None) -> None:
    for linear in (None, sglangs_own):
        model = model_of(experts_of(), linear)
        assert norm.install(model, linear=True) == (1, 0)
        assert model[0].input_layernorm(zeros(), zeros()) == "SGLang's"
    assert norm.install(model_of(experts_of(), functools.partial(triton_w8a8_block_fp8_linear)), True) == (1, 1)
    model = model_of(experts_of())
    model[0].self_attn.qkv_proj.quant_method.quant_config.weight_block_size = [128, 64]
    assert norm.install(model, linear=True) == (1, 0)


def test_other_calls_are_sglangs(on_a_cpu: None) -> None:
    model = model_of(experts_of())
    norm.install(model, linear=False)
    module = model[0].post_attention_layernorm
    for given in (
        (zeros(),), (zeros(), zeros().float()), (zeros().float(), zeros().float()), (zeros(0), zeros(0)),
        (zeros(norm.MOST_ROWS + 1),) * 2, (zeros(), zeros(), zeros()), (zeros(), zeros()[:2]), (zeros(8)[::2], zeros()),
    ):  # fmt: skip
        assert module(*given) == "SGLang's"
    assert module(zeros(), zeros(), quant_linear=object()) == "SGLang's"
    assert module(zeros(), zeros(), None)[0].shape == (4, 256)


@pytest.mark.parametrize(
    ("experts", "changes"),
    [
        (None, {}),
        (experts_of(block=False), {}),
        (experts_of(batch_invariant=True), {}),
        (experts_of(hidden=384), {}),
        (experts_of(), dict(variance_size_override=128)),
        (experts_of(), dict(cast_x_before_out_mul=True)),
        (experts_of(), dict(_quant_linear=object())),
        (experts_of(), dict(weight=torch.nn.Parameter(torch.ones(256)))),
    ],
    ids=["not ours", "tensor", "invariant", "size", "variance", "cast", "linear", "fp32"],
)
def test_other_norms_stay_sglangs(experts: Experts | None, changes: dict[str, Any], on_a_cpu: None) -> None:
    model = model_of(experts, **changes)
    assert norm.install(model, linear=True) == (0, 0)
    assert model[0].post_attention_layernorm(zeros(), zeros()) == "SGLang's"
    assert model[0].input_layernorm(zeros(), zeros()) == "SGLang's"


def test_a_model_that_is_loaded_again(on_a_cpu: None) -> None:
    """The record says how many; a second load takes the same norms over, once."""
    record = Record()
    hooks = MoeHooks(record)
    hooks.layers = 3
    model = model_of(experts_of())
    for _ in range(2):
        hooks.loaded(None, SimpleNamespace(model=model))
        said = "in 3 layers, with the norm in front of 1 and of 1 projections"
        assert any(said in line for line in record.lines()), record.lines()
        assert not isinstance(model[0].post_attention_layernorm.forward.original, norm.Norm)
    other = Record()
    MoeHooks(other).loaded(None, SimpleNamespace(model=SimpleNamespace()))  # not as expected: it works as it is
    assert any("norms stay SGLang's" in line for line in other._said)


def test_sglangs_quantisation_is_hooked(plugged: Record) -> None:
    """Where its projections look it up, and what it gives for rows that no norm made is SGLang's."""
    from sglang.srt.layers.quantization import fp8_utils

    assert fp8_utils.per_token_group_quant_fp8.__wrapped__ is not None
    x = zeros()
    rows.linear.put(x, x.to(torch.float8_e4m3fn), torch.full((4, 2), 3.0))
    try:
        values, scales = fp8_utils.per_token_group_quant_fp8(x, 128, column_major_scales=False)
    finally:
        rows.linear.forget()
    assert values.dtype == torch.float8_e4m3fn and (scales == 3).all()


def test_early_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, switch, early in (((9, 0), None, True), ((8, 9), None, False), ((9, 0), "0", False)):
        early_start.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setenv("HPC_PDL", switch) if switch else monkeypatch.delenv("HPC_PDL", raising=False)
        assert early_start(torch.device("cuda", 0)) is early and not early_start(torch.device("cpu"))
    early_start.cache_clear()


def check_quantised_alike(
    x: torch.Tensor, ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]
) -> int:
    """Two quantisations of x in groups of 128: equal, but for values in the middle of two e4m3 numbers.

    SGLang's kernel is compiled with fast division: 448 / amax is up to 2 ulp off (2^-22), its product half an ulp
    (2^-24), ours half an ulp each (2^-23). So the two may round a value differently where the middle is within
    2^-21 of it. As x and amax have 8 bits, middles are met exactly, and often: by 0.1 to 0.4 % of values of a norm.
    Scales are one or two roundings of amax / 448, less than 2^-22 apart; SGLang's amax is 1e-10 at least.

    Returns how many values differ.
    """
    groups = x.double().view(len(x), -1, 128)
    exact = (groups * (448 / groups.abs().amax(2, keepdim=True).clamp_min(1e-10))).view(x.shape)
    first, second = ours[0].double(), theirs[0].double()
    other = first != second
    away = (((first + second) / 2 - exact).abs() / exact.abs())[other]
    assert (away <= 2**-21).all(), f"{other.sum()} of {x.numel()} values differ, one {away.max():.3g} from a middle"
    apart = ((ours[1].double() - theirs[1].double()).abs() - 2**-22 * theirs[1].double()).max()
    assert apart <= 1e-10 / 448 * 1.001, f"scales differ by {apart:.3g} more than 2^-22 of them"
    return int(other.sum())


def test_what_may_differ_from_sglangs_quantisation() -> None:
    """Quotients up to two ulp off, as its kernel's may be, pass and do change values; a step of e4m3 does not pass."""
    x, residual, weight = problem(33, 512)
    total = x.double() + residual.double()
    x = (total * (total.square().mean(1, keepdim=True) + EPSILON).rsqrt() * weight).to(torch.bfloat16)
    values, scales = quantize_groups(x, 128)
    groups = x.float().view(33, 4, 128)
    largest = groups.abs().amax(2, keepdim=True).clamp_min(1e-10)
    for ulps in (-2, -1, 1, 2):
        factor = ((torch.full_like(largest, 448) / largest).view(torch.int32) + ulps).view(torch.float32)
        theirs = (groups * factor).clamp(-448, 448).to(torch.float8_e4m3fn).view(33, 512)
        assert check_quantised_alike(x, (values, scales), (theirs, largest[..., 0] * (1 / 448))) > 0
    wrong = values.clone()
    wrong.view(torch.uint8)[3, 5] ^= 1
    for changed in ((wrong, scales), (values, scales * (1 + 2**-20)), (values.roll(1, 0), scales)):
        with pytest.raises(AssertionError, match="differ"):
            check_quantised_alike(x, changed, (values, scales))


@pytest.mark.gpu
def test_a_projection_says_what_it_says_without(plugged: Record) -> None:
    """SGLang's Triton projection: of rows that it quantises, of the same rows handed over, and of a norm's."""
    from sglang.srt.layers.quantization import fp8_utils

    device, blocks = torch.device("cuda"), [128, 128]
    source = torch.Generator().manual_seed(2)
    weight = (torch.randn(384, 512, generator=source) * 40).to(device).to(torch.float8_e4m3fn)
    scale = (torch.rand(3, 4, generator=source) + 0.5).to(device)
    x, residual, factor = (value.to(device) for value in problem(33, 512))
    values, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(33, 4, device=device)
    norm.run(x, residual, factor, EPSILON, values, scales)
    rows.linear.forget()
    want = fp8_utils.triton_w8a8_block_fp8_linear(x, weight, blocks, scale)
    theirs = fp8_utils.per_token_group_quant_fp8(x, 128, column_major_scales=False)
    check_quantised_alike(x, (values, scales), theirs)
    for made in (theirs, (values, scales)):
        before = calls["moe.quantised_linear"]
        rows.linear.put(x, *made)
        got = fp8_utils.triton_w8a8_block_fp8_linear(x, weight, blocks, scale)
        assert calls["moe.quantised_linear"] == before + 1, dict(calls)
        product = fp8_utils.w8a8_block_fp8_matmul_triton(made[0], weight, made[1], scale, blocks, output_dtype=x.dtype)
        assert torch.equal(got, product), f"{(got != product).sum()} of {got.numel()} differ from their own product"
        if made is theirs:
            assert torch.equal(got, want), f"{(got != want).sum()} of {got.numel()} differ with the same rows"
    assert want.float().abs().max() > 0
