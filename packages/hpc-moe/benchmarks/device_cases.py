"""The cases of device_check.py: shapes, their random inputs, the call, and what float64 expects of it."""

import dataclasses
import types

import hpc_moe
import torch
from hpc_common.reference import moe as reference
from moe import random_e4m3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU: a rehearsal of the script itself


@dataclasses.dataclass
class Case:
    """One shape. ep: ranks (this is ``rank``). skip: share of ids set to -1. pick: how ids are drawn."""

    quant: str
    tokens: int
    experts: int = 16
    k: int = 4
    hidden: int = 512
    inter: int = 256
    x: str = "e4m3"
    ep: int = 1
    rank: int = 0
    skip: float = 0.0
    pick: str = "uniform"  # "uniform", "one" (all on one expert), "few" (most experts empty), "dup" (repetitions)
    limit: float | None = None
    shared: bool = False
    factor: float = 1.0
    wide_ids: bool = False
    invariant: bool = False  # batch_invariant: no low regime

    def name(self) -> str:
        """Short text with what differs from the defaults."""
        parts = [self.quant, f"T{self.tokens}", f"E{self.experts}", f"k{self.k}", f"H{self.hidden}", f"I{self.inter}"]
        for field in dataclasses.fields(self)[6:]:
            if getattr(self, field.name) != field.default:
                parts.append(f"{field.name}={getattr(self, field.name)}")
        return " ".join(parts)


def grid() -> list[Case]:
    """Cases in the order of size: an early hang costs little."""
    cases = []
    for quant in ("tensor", "block", "none"):
        x = "bf16" if quant == "none" else "e4m3"
        cases += [Case(quant, 1, x=x), Case(quant, 5, x=x), Case(quant, 33, x=x, inter=192)]
    for quant in ("tensor", "block"):
        cases += [Case(quant, 7, x="bf16"), Case(quant, 130, x="bf16", inter=192, wide_ids=True)]
        for inter in (64, 128, 192, 320, 768):
            cases.append(Case(quant, 40, inter=inter, hidden=384))
        for tokens in (15, 16, 17, 31, 32, 33, 64, 65, 96, 112, 113, 127, 128, 129, 255, 256, 257, 300, 513):
            cases.append(Case(quant, tokens, experts=3, k=1, pick="one", invariant=True))
        cases.append(Case(quant, 200, pick="few"))
        cases.append(Case(quant, 64, k=32, pick="dup"))
        cases.append(Case(quant, 64, k=3, skip=0.4, shared=True, factor=2.5, limit=1.0))
        for rank in (0, 1, 3):
            cases.append(Case(quant, 160, experts=8, ep=4, rank=rank, skip=0.1))
        cases.append(Case(quant, 50, experts=512, k=8))
        # The low regime: every number of tiles and splits, both column widths, few and many scale groups.
        for hidden, inter in ((128, 64), (256, 128), (1024, 192), (2048, 768), (2176, 1536), (4096, 192), (4096, 1536)):
            for tokens in (1, 3, 12):
                for x in ("e4m3", "bf16"):
                    cases.append(Case(quant, tokens, experts=24, k=8, hidden=hidden, inter=inter, x=x))
        cases.append(Case(quant, 96, experts=192, k=8, hidden=4096, inter=192))
        cases.append(Case(quant, 128, experts=512, k=8, hidden=2304, inter=192, x="bf16", wide_ids=True))
        cases.append(Case(quant, 100, experts=192, k=8, hidden=1024, inter=128, pick="one"))
        cases.append(Case(quant, 32, experts=128, k=32, hidden=512, inter=320, pick="dup", skip=0.3, shared=True))
        cases.append(Case(quant, 64, experts=24, k=8, ep=8, rank=5, hidden=4096, inter=1536, factor=2.5, limit=1.0))
        cases.append(Case(quant, 9, experts=16, k=4, skip=1.0, shared=True))
    cases.append(Case("none", 300, x="bf16", inter=320, skip=0.2, ep=2, rank=1, limit=1.0, shared=True))
    for quant in ("tensor", "block"):
        cases.append(Case(quant, 2048, experts=192, k=8, hidden=4096, inter=192))
        cases.append(Case(quant, 512, experts=24, k=8, hidden=4096, inter=1536, x="bf16"))
        cases.append(Case(quant, 1024, experts=128, k=8, hidden=2048, inter=768))
        cases.append(Case(quant, 9000, experts=24, k=8, hidden=1024, inter=256))
        cases.append(Case(quant, 40000, experts=16, k=2, hidden=256, inter=128))  # two chunks
    return cases


@dataclasses.dataclass
class Inputs:
    """Tensors of a case; scales are None where the quantisation has none."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    act_scale: torch.Tensor | None = None
    shared: torch.Tensor | None = None


def steps(shape: tuple[int, ...], base: float) -> torch.Tensor:
    """Scales of which neighbours in every dimension differ by 4 or 16."""
    index = sum(
        torch.arange(n, device=DEVICE).view([-1 if d == i else 1 for d in range(len(shape))])
        for i, n in enumerate(shape)
    )
    return (base * 4.0 ** (index % 3)).float().expand(shape).contiguous()


def make(case: Case) -> Inputs:
    """Random inputs, the same ones each run."""
    torch.manual_seed(sum(map(ord, case.name())))
    t, e, h, i, k = case.tokens, case.experts, case.hidden, case.inter, case.k
    total = e * case.ep
    if case.pick == "one":
        ids = torch.full((t, k), total - 1, device=DEVICE)
    elif case.pick == "few":
        ids = torch.randint(0, 3, (t, k), device=DEVICE) * (total // 3)
    elif case.pick == "dup":
        ids = torch.randint(0, total, (t, k), device=DEVICE)
    else:
        ids = torch.rand(t, total, device=DEVICE).topk(min(k, total), dim=1).indices
    ids = torch.where(torch.rand(t, k, device=DEVICE) < case.skip, -1, ids).to(
        torch.int64 if case.wide_ids else torch.int32
    )
    weights = torch.rand(t, k, device=DEVICE)
    local = (ids >= case.rank * e) & (ids < (case.rank + 1) * e)
    weights = torch.where(local, weights, torch.nan)  # of slots that must not count
    shared = torch.randn(t, h, device=DEVICE).bfloat16() if case.shared else None
    if case.quant == "none":
        w13 = torch.randn(e, 2 * i, h, device=DEVICE, dtype=torch.bfloat16) * (2 / h) ** 0.5
        w2 = torch.randn(e, h, i, device=DEVICE, dtype=torch.bfloat16) * i**-0.5
        return Inputs(torch.randn(t, h, device=DEVICE).bfloat16(), w13, w2, ids, weights, shared=shared)
    w13, w2 = random_e4m3((e, 2 * i, h), DEVICE), random_e4m3((e, h, i), DEVICE)
    made = Inputs(torch.empty(0), w13, w2, ids, weights, shared=shared)
    block = 128 if i % 128 == 0 else 64
    if case.quant == "block":
        made.w13_scale = steps((e, 2 * i // block, h // 128), h**-0.5 / 512)
        made.w2_scale = steps((e, h // 128, i // block), i**-0.5 / 512)
    else:
        made.w13_scale, made.w2_scale = steps((e,), h**-0.5 / 256), steps((e,), i**-0.5 / 256)
        made.x_scale = torch.tensor([1 / 100], device=DEVICE)
        made.act_scale = torch.tensor([1 / 16], device=DEVICE)
    if case.x == "bf16":
        made.x = torch.randn(t, h, device=DEVICE).bfloat16()
    else:
        made.x = (torch.randn(t, h, device=DEVICE) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
        if case.quant == "block":
            made.x_scale = steps((t, h // 128), 1 / 256)
    return made


def expected(case: Case, c: Inputs) -> torch.Tensor:
    """[T, H] float64 on the GPU; hpc_common.reference.moe.fused_moe without its copies to the CPU."""
    wide = reference._input(c.x, case.quant, c.x_scale)
    total = torch.zeros(c.x.shape, dtype=torch.float64, device=DEVICE)
    scales13 = [None] * case.experts if c.w13_scale is None else c.w13_scale
    scales2 = [None] * case.experts if c.w2_scale is None else c.w2_scale
    for expert in range(case.experts):
        tokens, slots = (c.ids == case.rank * case.experts + expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate_up = wide[tokens] @ reference.dequantise_weight(c.w13[expert], scales13[expert]).T
        act = reference.activation(gate_up[:, : case.inter], gate_up[:, case.inter :], case.limit)
        rows = reference._between(act, case.quant, c.act_scale)
        rows = rows @ reference.dequantise_weight(c.w2[expert], scales2[expert]).T
        total.index_add_(0, tokens, rows * c.weights[tokens, slots].double()[:, None])
    total *= case.factor
    return total if c.shared is None else total + c.shared.double()


def quant_of(case: Case, c: Inputs) -> hpc_moe.Fp8Block | hpc_moe.Fp8Tensor | None:
    """The case's scales as the operator takes them."""
    if case.quant == "block":
        return hpc_moe.Fp8Block(c.w13_scale, c.w2_scale, c.x_scale)
    return hpc_moe.Fp8Tensor(c.w13_scale, c.w2_scale, c.x_scale, c.act_scale) if case.quant == "tensor" else None


def as_call(case: Case, c: Inputs) -> types.SimpleNamespace:
    """The case as tests/moe_kernel_checks.py takes it."""
    options = {"swiglu_limit": case.limit, "ep_rank": case.rank, "shared_output": c.shared}
    options["routed_scaling_factor"] = case.factor
    tensors = {"x": c.x, "w13": c.w13, "w2": c.w2, "topk_ids": c.ids, "topk_weights": c.weights}
    return types.SimpleNamespace(**tensors, quant=quant_of(case, c), options=options)


def call(case: Case, c: Inputs, workspace: torch.Tensor) -> torch.Tensor:
    """The operator, into an output full of NaN and with a workspace full of 0xFF."""
    workspace.fill_(255)
    out = torch.full(c.x.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
    return hpc_moe.fused_moe(
        c.x,
        c.w13,
        c.w2,
        c.ids,
        c.weights,
        quant_of(case, c),
        ep_rank=case.rank,
        num_experts=case.experts * case.ep,
        swiglu_limit=case.limit,
        shared_output=c.shared,
        routed_scaling_factor=case.factor,
        batch_invariant=case.invariant,
        workspace=workspace,
        out=out,
    )
