"""Cases for the tests of fused_moe: inputs of every quantisation, their reference, and the comparison.

A test with the argument ``kind`` runs for every row of the support table and on every device that the row names, so a
kernel that flips its row is held to all of them. ``moe_case`` makes the inputs.
"""

import faulthandler
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_common.metrics import error, relative_rms_rows
from hpc_common.reference import moe as reference
from hpc_common.testing import device_params
from hpc_moe import support

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # tests are no package
import moe_kernel_checks  # noqa: E402

E4M3 = torch.float8_e4m3fn
# name -> (quantisation, whether x comes as e4m3, row of the support table)
KINDS = {
    "block-bf16": ("block", False, "block FP8, bf16 x"),
    "block-e4m3": ("block", True, "block FP8, e4m3 x"),
    "tensor-bf16": ("tensor", False, "per-tensor FP8, bf16 x"),
    "tensor-e4m3": ("tensor", True, "per-tensor FP8, e4m3 x"),
    "bf16": ("none", False, "bf16 weights"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("kinds")
        params = []
        for kind in only.args if only else KINDS:
            for device in device_params(support.SUPPORT, "fused_moe", KINDS[kind][2]):
                name, marks = (device, ()) if isinstance(device, str) else (device.values[0], device.marks)
                params.append(pytest.param((kind, name), marks=marks, id=f"{kind}-{name}"))
        metafunc.parametrize("kind", params)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kinds(*names): run a test of fused_moe only for these quantisations")


@pytest.fixture(autouse=True)
def _single_thread(one_thread: None) -> None:
    """Many small matrices: a second thread only waits."""


@pytest.fixture
def no_hang() -> Iterator[None]:
    """A kernel that hangs ends the run with a traceback instead of holding the GPU."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@dataclass
class Case:
    """Inputs of one call on one device; ``options`` are fused_moe's keyword arguments besides quant."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    quant: Any
    options: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> "Case":
        """A copy with other tensors or quant; unknown names go to the options."""
        own = {name: value for name, value in changes.items() if name in self.__dataclass_fields__}
        rest = {name: value for name, value in changes.items() if name not in own}
        return replace(self, **own, options={**self.options, **rest})

    def scales(self, **changes: torch.Tensor) -> "Case":
        """A copy with other scales."""
        return replace(self, quant=replace(self.quant, **changes))

    def tokens(self, pick: Any) -> "Case":
        """The call with a selection of the tokens."""
        quant = self.quant
        if isinstance(quant, hpc_moe.Fp8Block) and quant.x_scale is not None:
            quant = replace(quant, x_scale=quant.x_scale[pick])
        x = self.x.view(torch.uint8)[pick].view(E4M3) if self.x.dtype == E4M3 else self.x[pick]
        return replace(self, x=x, quant=quant, topk_ids=self.topk_ids[pick], topk_weights=self.topk_weights[pick])

    def rank(self, rank: int, ranks: int) -> "Case":
        """What rank ``rank`` of ``ranks`` computes: its slice of the experts, all tokens."""
        experts = self.w13.shape[0]
        own = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
        quant = self.quant
        if quant is not None:
            quant = replace(quant, w13_scale=quant.w13_scale[own], w2_scale=quant.w2_scale[own])
        return self.but(w13=self.w13[own], w2=self.w2[own], quant=quant, ep_rank=rank, num_experts=experts)

    def run(self, **options: Any) -> torch.Tensor:
        """The operator's result."""
        tensors = (self.x, self.w13, self.w2, self.topk_ids, self.topk_weights)
        return hpc_moe.fused_moe(*tensors, quant=self.quant, **{**self.options, **options})

    def want(self) -> torch.Tensor:
        """The float64 reference on the CPU."""
        names = ("ep_rank", "swiglu_limit", "shared_output", "routed_scaling_factor")
        options = {name: self.options[name] for name in names if name in self.options}
        scales = {} if self.quant is None else {name: getattr(self.quant, name) for name in vars(self.quant)}
        tensors = (self.x, self.w13, self.w2, self.topk_ids, self.topk_weights)
        return reference.fused_moe(*tensors, quant=hpc_moe.quant.quant_name(self.quant), **scales, **options)

    def errors(self, result: torch.Tensor, want: torch.Tensor | None = None) -> tuple[float, float]:
        """Relative RMS error over the output, and the largest of any token."""
        want = self.want() if want is None else want
        rows = relative_rms_rows(result, want)
        return error(result, want).relative_rms, float(rows.max()) if rows.numel() else 0.0

    def check(self, result: torch.Tensor, want: torch.Tensor | None = None) -> None:
        """The operator's error bounds: 0.006 over the output, 0.02 in any token; a GPU's as moe_kernel_checks says."""
        if result.is_cuda:
            moe_kernel_checks.check(self, result, self.want() if want is None else want)
            return
        overall, worst = self.errors(result, want)
        assert overall <= 0.006 and worst <= 0.02, f"relative RMS {overall:.5f} over the output, {worst:.5f} in a token"


def steps(*indices: torch.Tensor) -> torch.Tensor:
    """Scales 1, 5, 25 by the sum of the indices modulo 3, times 0.95 to 1.05: neighbours differ by 4.5 or more."""
    total = sum(indices)
    return 5.0 ** (total % 3).float() * (1 + 0.05 * torch.sin(total.float() * 12.9898))


def _grid(*shape: int) -> list[torch.Tensor]:
    return list(torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij"))


def make_case(
    kind: str | tuple[str, str],
    tokens: int = 24,
    top_k: int = 4,
    experts: int = 8,
    hidden: int = 384,
    inter: int = 256,
    seed: int = 0,
    dead: float = 0.1,
    ids: torch.Tensor | None = None,
    device: str | None = None,
) -> Case:
    """Random inputs whose gate and up are of order 1.

    Weight scales differ by at least 4 between neighbouring blocks and experts, x's between tokens and groups. A share
    ``dead`` of the slots has id -1 and a NaN weight. ``kind``: a name of KINDS, or (name, device).
    """
    name, device = (kind, device or "cpu") if isinstance(kind, str) else kind
    quant, x_e4m3, _ = KINDS[name]
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, w13, w2 = randn(tokens, hidden), randn(experts, 2 * inter, hidden), randn(experts, hidden, inter)
    if ids is None:
        scores = torch.rand(tokens, max(experts, top_k), generator=generator)
        ids = scores.topk(top_k, 1).indices % experts if tokens else torch.empty(0, top_k, dtype=torch.int64)
    weights = torch.rand(ids.shape, generator=generator) + 0.1
    lost = torch.rand(ids.shape, generator=generator) < dead
    ids = torch.where(lost, -1, ids).int()
    weights = torch.where(lost, float("nan"), weights)
    norm = 64 * 14.7  # stored values have an rms of 64, the scales 1, 5, 25 one of 14.7

    def put(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().to(device)

    if quant == "none":
        spread13, spread2 = steps(*_grid(experts)) / 14.7, steps(*_grid(experts)).flip(0) / 14.7
        w13 = (w13 * spread13[:, None, None] * hidden**-0.5).bfloat16()
        w2 = (w2 * spread2[:, None, None] * inter**-0.5).bfloat16()
        return Case(*(put(each) for each in (x.bfloat16(), w13, w2, ids, weights)), None)

    q13, q2 = (reference.to_e4m3(each * 64) for each in (w13, w2))
    x_scale = None
    if quant == "block":
        block = 128 if inter % 128 == 0 else 64
        s13 = steps(*_grid(experts, 2 * inter // block, hidden // 128)) / norm * hidden**-0.5
        s2 = steps(*_grid(experts, hidden // 128, inter // block)) / norm * inter**-0.5
        if x_e4m3:
            token, column = _grid(tokens, hidden // 128)
            x_scale = put(steps(token, 2 * column) / norm)
        scales: Any = hpc_moe.Fp8Block(put(s13), put(s2), x_scale)
    else:
        s13 = steps(*_grid(experts)) / norm * hidden**-0.5
        s2 = steps(*_grid(experts)).flip(0) / norm * inter**-0.5
        scales = hpc_moe.Fp8Tensor(put(s13), put(s2), put(torch.tensor([1 / 64])), put(torch.tensor([1 / 32])))
    x = reference.to_e4m3(x * 64) if x_e4m3 else x.bfloat16()
    return Case(*(put(each) for each in (x, q13, q2, ids, weights)), scales)


@pytest.fixture(scope="session")
def moe_case() -> Callable[..., Case]:
    """``moe_case(kind, tokens=24, top_k=4, experts=8, hidden=384, inter=256, ...)``; see make_case."""
    return make_case
