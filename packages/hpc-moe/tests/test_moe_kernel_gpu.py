"""Kernels of fused_moe on a Hopper GPU: what the value tests, which also run there, do not ask.

The index against the host's, every edge of a tile's width, rows that depend on nothing but themselves, memory around
and below the call, streams, graphs, and predecessors that end late. test_moe_equal_experts_gpu.py has every kind of
kernel with any share of the tokens.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import hpc_moe
import pytest
import torch
from hpc_common.poison import Canary, bits
from moe_kernel_checks import config_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_hang")]

FP8 = ("block-e4m3", "block-bf16", "tensor-e4m3", "tensor-bf16")
CaseMaker = Callable[..., Any]


def traced(case: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run in a workspace full of 0xFF; returns out, offsets, slot_to_row, and y's rows by slot (zeros for none).

    Not for the low regime, whose index and rows stay in shared memory.
    """
    config = config_of(case)
    space = torch.full((config.layout.bytes,), 255, dtype=torch.uint8, device="cuda")
    out = case.run(workspace=space)
    pairs, hidden = case.topk_ids.numel(), case.x.shape[1]

    def ints(offset: int, count: int) -> torch.Tensor:
        return space[offset : offset + 4 * count].view(torch.int32).long()

    slots = ints(config.layout.slot_to_row, pairs)
    y = space[config.layout.y : config.layout.y + 2 * pairs * hidden].view(torch.int16).view(pairs, hidden)
    rows = torch.where((slots >= 0)[:, None], y[slots.clamp_min(0)], 0)
    return out, ints(config.layout.offsets, case.w13.shape[0] + 1), slots, rows


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (33, 3, 7), (700, 8, 512), (3000, 8, 24)])
def test_index_is_a_stable_sort(tokens: int, top_k: int, experts: int, moe_case: CaseMaker) -> None:
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
    case = moe_case("tensor-e4m3", tokens, top_k, experts, 128, 64, ids=ids, device="cuda").but(batch_invariant=True)
    _, offsets, slots, _ = traced(case)
    flat = case.topk_ids.flatten().long()
    live = (flat >= 0) & (flat < experts)
    assert torch.equal(offsets[1:], torch.bincount(flat[live], minlength=experts).cumsum(0)) and offsets[0] == 0
    order = torch.argsort(torch.where(live, flat, experts), stable=True)[: int(live.sum())]
    want = torch.full_like(flat, -1)
    want[order] = torch.arange(len(order), device="cuda")
    assert torch.equal(slots, want)


@pytest.mark.parametrize("name", ["block-e4m3", "tensor-e4m3", "bf16"])
@pytest.mark.parametrize("inter", [128, 192])
def test_every_tile_width(name: str, inter: int, moe_case: CaseMaker) -> None:
    """One expert with each count around the edges of all widths, and of one to four tiles."""
    edges = [count + step for count in (*range(16, 65, 16), *range(72, 137, 8), 256, 384, 512) for step in (-1, 0, 1)]
    for tokens in edges:
        ids = torch.ones(tokens, 1, dtype=torch.int32)
        case = moe_case(name, tokens, 1, 3, 256, inter, ids=ids, dead=0.0, device="cuda")
        case = case.but(batch_invariant=True)
        case.check(case.run())


@pytest.mark.parametrize("name", [*FP8, "bf16"])
def test_rows_depend_on_themselves_alone(name: str, moe_case: CaseMaker) -> None:
    """Rows before the reduction: the same bits alone, in a batch (other tile widths), and on the rank that has them."""
    case = moe_case(name, tokens=700, device="cuda").but(batch_invariant=True)
    rows = traced(case)[3].view(700, -1)
    for pick in (slice(0, 1), slice(3, 20), slice(100, 400)):
        assert torch.equal(traced(case.tokens(pick))[3].view(rows[pick].shape), rows[pick])
    parts = [traced(case.rank(rank, 4))[3].view(rows.shape) for rank in range(4)]
    assert torch.equal(sum(parts[1:], parts[0]), rows)


@pytest.mark.parametrize("name", FP8)
def test_panels(name: str, moe_case: CaseMaker) -> None:
    """Down and the reduction in panels of columns: the same bits as for fewer tokens, whose y is one panel."""
    case = moe_case(name, 600, 32, 160, 1024, 128, device="cuda")
    shared = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(3)).bfloat16().cuda()
    case = case.but(shared_output=shared, routed_scaling_factor=2.5)
    assert config_of(case).panel_columns == 512
    result = case.run()
    for pick in (slice(0, 300), slice(300, 600)):
        part = case.tokens(pick).but(shared_output=shared[pick])
        assert config_of(part).panel_columns == 1024
        assert torch.equal(bits(part.run()), bits(result[pick]))
    case.check(result)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize(
    ("tokens", "hidden", "inter"), [(1, 128, 64), (3, 2048, 192), (8, 2176, 768), (14, 4096, 192), (5, 256, 1536)]
)
def test_low_regime(name: str, tokens: int, hidden: int, inter: int, moe_case: CaseMaker) -> None:
    """Both column widths, one and more splits, scale groups of 64 and 128, inline and separate quantisation."""
    case = moe_case(name, tokens, 8, 16, hidden, inter, device="cuda")
    assert config_of(case).regime == "low"
    result = case.run()
    assert torch.equal(bits(case.tokens(slice(0, 1)).run()), bits(result[:1]))
    case.check(result)


@pytest.mark.parametrize("name", FP8)
def test_low_regime_rows_depend_on_themselves_alone(name: str, moe_case: CaseMaker) -> None:
    case = moe_case(name, 64, 8, 128, 512, 192, device="cuda")
    assert config_of(case).regime == "low"
    result = case.run()
    for pick in (slice(0, 3), slice(25, 60), slice(63, 64)):
        assert torch.equal(bits(case.tokens(pick).run()), bits(result[pick]))


@pytest.mark.parametrize("name", [*FP8, "bf16"])
@pytest.mark.parametrize("tokens", [3, 12, 300])
def test_repeats_and_canaries(name: str, tokens: int, moe_case: CaseMaker) -> None:
    case = moe_case(name, tokens=tokens, device="cuda")
    first = case.run()
    with (
        Canary((config_of(case).layout.bytes,), torch.uint8, "cuda") as space,
        Canary(case.x.shape, torch.bfloat16, "cuda") as out,
    ):
        for fill in range(1000):
            space.fill_(fill % 256)
            case.run(workspace=space, out=out)
            assert torch.equal(bits(out), bits(first))


@pytest.mark.parametrize("name", ["block-bf16", "tensor-e4m3"])
@pytest.mark.parametrize("tokens", [3, 16, 150])
def test_replay_with_new_ids(name: str, tokens: int, moe_case: CaseMaker) -> None:
    """A captured call follows ids, weights and activations that change in place, down to no live slot at all."""
    cases = [
        moe_case(name, tokens=tokens, seed=seed, dead=dead, device="cuda") for seed, dead in enumerate((0.1, 0.9, 1.0))
    ]
    fixed = cases[0].but(x=cases[0].x.clone(), topk_ids=cases[0].topk_ids.clone())
    fixed = fixed.but(topk_weights=fixed.topk_weights.clone())
    out = fixed.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fixed.run(out=out)
    for case in [*cases, cases[0]]:
        fixed.x.copy_(case.x)
        fixed.topk_ids.copy_(case.topk_ids)
        fixed.topk_weights.copy_(case.topk_weights)
        graph.replay()
        assert torch.equal(bits(out), bits(fixed.run()))


@pytest.mark.parametrize("sizes", [(200, 150), (3, 16)])
def test_two_streams(sizes: tuple[int, int], moe_case: CaseMaker) -> None:
    cases = [moe_case("block-bf16", tokens=tokens, device="cuda") for tokens in sizes]
    want = [case.run() for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[index].append(cases[index].run())
    torch.cuda.synchronize()
    for index in range(2):
        assert all(torch.equal(bits(each), bits(want[index])) for each in got[index])


@pytest.mark.parametrize("uneven", [False, True])
def test_gate_up_of_all_columns_at_once(uneven: bool, moe_case: CaseMaker) -> None:
    """The tasks that a large layer of 192 columns of I has, experts of one to four tiles: bits as for fewer tokens."""
    experts, tokens = 96, 1800
    draws = torch.Generator().manual_seed(5)
    weights = torch.arange(1, experts + 1).float() if uneven else torch.ones(experts)
    ids = torch.multinomial(weights.expand(tokens, -1), 8, generator=draws).int()
    case = moe_case("tensor-e4m3", tokens, 8, experts, 256, 192, ids=ids, device="cuda")
    assert tuple(config_of(case).rule) == (96, 8, True)
    result = case.run()
    for pick in (slice(0, 900), slice(900, tokens)):
        part = case.tokens(pick)
        assert tuple(config_of(part).rule) == (128, 8, False)
        assert torch.equal(bits(part.run()), bits(result[pick]))


@pytest.mark.parametrize("name", ["block-bf16", "tensor-e4m3"])
@pytest.mark.parametrize("tokens", [3, 16, 150])
def test_late_producer(name: str, tokens: int, moe_case: CaseMaker) -> None:
    """Inputs written by a kernel that ends late, on the same side stream: the call must see the new ones."""
    old, new = (moe_case(name, tokens=tokens, seed=seed, device="cuda") for seed in (1, 2))
    want = new.but(w13=old.w13, w2=old.w2, quant=old.quant).run()
    if name.startswith("block"):
        assert old.quant.x_scale is None
    case = old.but(x=old.x.clone(), topk_ids=old.topk_ids.clone(), topk_weights=old.topk_weights.clone())
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            for name_of in ("x", "topk_ids", "topk_weights"):
                getattr(case, name_of).copy_(getattr(old, name_of))
            torch.cuda._sleep(200_000)
            for name_of in ("x", "topk_ids", "topk_weights"):
                getattr(case, name_of).copy_(getattr(new, name_of))
            assert torch.equal(bits(case.run()), bits(want))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_offsets_beyond_32_bits(batch_invariant: bool, moe_case: CaseMaker) -> None:
    """Weights of more than 2^31 bytes: the last expert gives what the first gives with the same weights."""
    experts, hidden, inter = 130, 4096, 2048
    small = moe_case("block-bf16", 4, 2, 1, hidden, inter, dead=0.0, ids=torch.zeros(4, 2).int(), device="cuda")
    small = small.but(batch_invariant=batch_invariant)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(experts, *tensor.shape[1:], dtype=tensor.dtype, device="cuda")
        wide[-1] = tensor[0]
        return wide

    quant = hpc_moe.Fp8Block(spread(small.quant.w13_scale), spread(small.quant.w2_scale))
    large = small.but(w13=spread(small.w13), w2=spread(small.w2), quant=quant, topk_ids=small.topk_ids + experts - 1)
    assert torch.equal(bits(large.run()), bits(small.run()))


def digest(moe_case: CaseMaker) -> str:
    """A hash of the outputs of calls of every regime, back to back."""
    found = hashlib.sha256()
    for name in FP8:
        for tokens in (2, 16, 150, 700):
            case = moe_case(name, tokens=tokens, device="cuda")
            for _ in range(3):
                result = case.run()
            found.update(result.view(torch.int16).cpu().numpy().tobytes())
    return found.hexdigest()


def test_without_programmatic_launch(moe_case: CaseMaker) -> None:
    """HPC_PDL=0, which a process reads once, gives the same bits."""
    script = "import conftest, test_moe_kernel_gpu as t; print(t.digest(conftest.make_case))"
    tests = pathlib.Path(__file__).parent  # the working directory comes first: elsewhere "conftest" may be another
    paths = [str(tests), *(str(pathlib.Path(each).absolute()) for each in sys.path)]
    environment = {**os.environ, "HPC_PDL": "0", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tests, env=environment, capture_output=True, text=True, timeout=50
    )
    assert done.stdout.strip() == digest(moe_case), done.stderr
