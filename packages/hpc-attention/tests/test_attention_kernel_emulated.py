"""The decode kernels' arithmetic without a GPU: their own sources on a CPU emulation of thread blocks.

emulation/block.hpp says what is emulated and what is not. The kernels, their launchers and csrc/api/decode.cpp are
compiled once a session, with planted faults in them that a number switches on; each of those must be noticed.
"""

import ctypes
import functools
import importlib
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hpc_attention import DecodePlan, _cuda
from hpc_attention.support import FP8
from hpc_attention.testing import Inputs, Problem
from hpc_common.poison import Canary, dirty_, fill_nan_

BF16, FP16 = torch.bfloat16, torch.float16
EMULATION = Path(__file__).resolve().parent / "emulation"
CSRC = EMULATION.parents[1] / "csrc"
COMMON = EMULATION.parents[3] / "common" / "include"
# Headers whose functions are PTX, and what such a function looks like; emulation/ptx.hpp stands in for those.
PTX_HEADERS = ("fifo.cuh", "fp8.cuh", "mbarrier.cuh", "mma.cuh", "pdl.cuh", "wgmma_half.cuh")
FUNCTION = re.compile(r"^(?:template <.*>\n)?__device__ (?:.*\n)+?\}\n", re.MULTILINE)
# Slowest first.
SOURCES = (
    "launch/decode_e4m3.cu", "launch/decode_bf16.cu", "launch/decode_fp16.cu", "api/decode.cpp", "launch/decode.cu",
    "launch/plan.cu",
)  # fmt: skip

SMALL = Problem(lengths=(150, 0, 65, 1), num_q_heads=8, num_kv_heads=2, num_ctas=3)
LONG = replace(SMALL, lengths=(700,), num_kv_heads=1, sm_scale=1.0)
# CTAs that begin in one request and go on in others.
LATER = replace(LONG, lengths=(70, 200, 150, 300), num_ctas=3)
# A CTA that begins with more pieces of one warp alone than it has warps.
SOLOS = replace(LONG, lengths=(60, 100, 20, 3, 9, 80, 33, 120, 64), num_ctas=1)
# Several slices a warp, each of 32 pages.
SMALL_PAGES = replace(LONG, lengths=(1500,), num_ctas=1, page_size=1, kv_dtype=FP8)
# Forty pairs in two pieces.
PAIRS = replace(LONG, lengths=(70,) * 40, num_ctas=80)
# Teams of warps: more than 8 query rows a KV head of D = 128.
TEAMS = replace(LONG, lengths=(1100, 5, 300), num_q_heads=16, q_len=2, kv_dtype=FP8, num_ctas=3)
# More pieces a CTA than its list and its queries have room for; most are one warp's alone.
MANY = replace(SMALL, lengths=(*(1 + 5 * i % 130 for i in range(60)), 200, 0, 270), head_dim=64, num_ctas=1)


@dataclass(frozen=True)
class Fault:
    """A mistake: a file of csrc/kernels, its text, the expression that takes its place, a problem that must show it.

    wrong: None leaves out the statement that `right` begins with.
    """

    file: str
    right: str
    wrong: str | None
    problem: Problem = SMALL


FAULTS = {
    "a tile is dropped": Fault(
        "decode_feed.cuh", "request.first_tile + piece.tile_end", "request.first_tile + piece.tile_end - 1"),
    "another head's keys and values": Fault(
        "decode_feed.cuh", "static_cast<uint64_t>(kv_head_) * cache.head_stride + lane % Layout::kLanes",
        "lane % Layout::kLanes",
    ),
    "columns of V are exchanged": Fault(
        "decode_attend.cuh", "chunk * kPairs + 2 * w + half", "chunk * kPairs + 2 * w + 1 - half",
        replace(SMALL, kv_dtype=FP8),
    ),
    "the output is not rescaled": Fault(
        "decode_attend.cuh", "exp2_approx(reference - raised)", "1.0f", replace(LONG, num_ctas=1)),
    "partial results of one thread are not rescaled": Fault(
        "combine.cuh", "exp2_approx(w[i].x - m0)", "1.0f", replace(LONG, lengths=(1536,), num_ctas=24)),
    "partial results of two threads are not rescaled": Fault(
        "decode_merge.cuh", "exp2_approx(b_ml.x - m0)", "1.0f", replace(LONG, num_ctas=6)),
    "pairs are counted from the wrong one": Fault(
        "combine.cuh", "unit -= __shfl_sync(kAllLanes, end, 31)", None, PAIRS),
    "partial results are read before pdl_wait": Fault(
        "combine.cuh", "pdl_wait();\n    waited = true;", None, LONG),
    "the causal mask is off by one": Fault(
        "decode_attend.cuh", "position < end", "position <= end", replace(SMALL, q_len=2)),
    "the window is off by one": Fault(
        "decode_attend.cuh", "position >= end - p_.window", "position > end - p_.window", replace(SMALL, window=20)
    ),
    "copies are not waited for": Fault(
        "decode_attend.cuh", "cp_async_wait<kStages - 1>();\n    __syncwarp();\n    score", None
    ),
    "a team's values are not waited for": Fault(
        "decode_team.cuh", "if (early) cp_async_wait<kPending>();  // values", None, TEAMS),
    "lanes do not wait for each other's copies": Fault("decode_attend.cuh", "__syncwarp();\n    score", None),
    "warps do not wait for each other's results": Fault(
        "decode.cuh", "__syncthreads();\n      for (int32_t vector", None
    ),
    "queries are overwritten before they are used": Fault(
        "decode.cuh", "index + 2 * kDecodeEpoch", "index + 3 * kDecodeEpoch", MANY
    ),
    "page ids of a block's first half for its second": Fault(
        "decode_feed.cuh", "(index_ << log_ids_) < 32", "true", SMALL_PAGES
    ),
    "a block ends without pdl_wait": Fault("decode.cuh", "if (waits) pdl_wait();", None, LONG),
    "the first query is read before pdl_wait": Fault("decode.cuh", "waits || (lists && waited)", "lists", SOLOS),
    "the last piece, taken first, for the first one": Fault(
        "decode_feed.cuh", "state_.cursor.count += order.rest.count > 0", None, replace(LATER, window=190)),
    "the last piece, taken before the list, for the first one": Fault(
        "decode.cuh", "2 * cta + (order.rest.count > 0)", "2 * cta", LATER),
    "nothing follows the last piece": Fault(
        "decode_feed.cuh", "if (added_.pieces == 1 && cursor.left == 0) cursor = state_.rest", None, LATER),
    "the list is asked for the first block again": Fault("decode_feed.cuh", "next_ = count_;\n", None, LATER),
    "a team's causal mask is off by one": Fault(
        "decode_team.cuh", "position < min(end, limit_)", "position <= min(end, limit_)", replace(TEAMS, num_ctas=1)),
    "a team does not wait for its probabilities": Fault(
        "decode_team.cuh", "named_barrier_any(1 + team_, kTeamThreads, above)", "above", TEAMS),
    "a slice is filled again before its team has read it": Fault(
        "decode_team.cuh", "named_barrier_sync(1 + team_, kTeamThreads);\n  }\n\n  // scores = K", None,
        replace(TEAMS, lengths=(1500,), num_ctas=1),
    ),
    "a warp's largest scores for the team's": Fault(
        "decode_team.cuh", "rows + w * kStep", "rows + part_ * kStep", TEAMS),
    "a team's slice goes past its piece": Fault(
        "decode_team.cuh", "position < min(end, limit_)", "position < end",
        replace(TEAMS, lengths=(1100,), num_ctas=6, sm_scale=0.05)),
    "a team's output is not rescaled": Fault(
        "decode_team.cuh", "exp2_approx(reference - raised)", "1.0f", replace(TEAMS, num_ctas=1)),
    "one warp's sums for the team's": Fault("decode.cuh", "pairs[i].y += more.y", None, TEAMS),
    "the first slice has tokens of this step": Fault(
        "decode_feed.cuh", "(all ? 0 : p_.q_len)", "0",
        replace(LONG, lengths=(576,), num_q_heads=1, q_len=8, num_ctas=9),
    ),
    "the second slice is of the first one's page": Fault(
        "decode_feed.cuh", "__shfl_sync(kAllLanes, ids_[0], index_)", "__shfl_sync(kAllLanes, ids_[0], 0)", LONG
    ),
    "warps put their results in one place": Fault("decode.cuh", "place * (kOutTiles * kTilePitch)", "0", LONG),
    "this step's tokens are read before pdl_wait": Fault(
        "decode_feed.cuh", "first_token(where) + kOwn <= pieces_[where].high - p_.q_len", "true"
    ),
}  # fmt: skip


def plant(text: str, fault: Fault, number: int) -> str:
    """`text` with a switch where the fault's right text stands; unchanged where it doesn't."""
    on = f"emulation::fault == {number}"
    if fault.wrong is None:
        return text.replace(fault.right, f"if (!({on})) {fault.right}")
    return text.replace(fault.right, f"({on} ? {fault.wrong} : {fault.right})")


def compile_emulation(compiler: str, build: Path) -> Path:
    """The shared library of the emulated kernels, from copies of the sources in `build`."""
    shutil.copytree(CSRC, build / "csrc")
    for file in (build / "csrc/kernels").iterdir():
        text = file.read_text().replace("extern __shared__", "extern")
        for number, fault in enumerate(FAULTS.values(), 1):
            text = plant(text, fault, number) if fault.file == file.name else text
        file.write_text(text)
    (build / "include/hpc").mkdir(parents=True)
    for name in PTX_HEADERS:
        text = (COMMON / "hpc" / name).read_text()
        text = FUNCTION.sub(lambda match: "" if re.search(r"\basm\b|__cvta", match[0]) else match[0], text)
        (build / "include/hpc" / name).write_text(text)
    (build / "include/hpc/wgmma_ss.cuh").write_text("#pragma once\n")  # ptx.hpp has what is used of it
    # _FORTIFY_SOURCE refuses jumps from stack to stack.
    flags = ["-std=c++20", "-O1", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
    flags += [f"-I{path}" for path in (EMULATION, build / "include", build / "csrc", COMMON)]

    def run(arguments: list[str]) -> None:
        result = subprocess.run([compiler, *arguments], capture_output=True, text=True)
        assert result.returncode == 0, f"{' '.join(arguments)}\n{result.stderr[:4000]}"

    def compiled(source: Path) -> str:
        to = build / f"{source.stem}{source.suffix}.o"
        ptx = ["-include", str(EMULATION / "ptx.hpp")] if source.suffix == ".cu" else []
        run([*flags, *ptx, "-x", "c++", "-c", str(source), "-o", str(to)])
        return str(to)

    sources = [build / "csrc" / name for name in SOURCES] + [EMULATION / "block.cpp", EMULATION / "driver.cpp"]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    library = build / "emulated.so"
    run(["-shared", "-pthread", *objects, "-o", str(library)])
    return library


class Emulated:
    """The emulated extension, in place of hpc_attention._C. RuntimeError with the text of a C++ error."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.emulation_call.restype = ctypes.c_char_p
        self.early = True  # as inside a capture

    def call(self, name: str, *arguments: object) -> int:
        slots: list[int] = []
        for argument in arguments:
            for entry in argument if isinstance(argument, tuple) else (argument,):
                slots += struct.unpack("q", struct.pack("d" if isinstance(entry, float) else "q", entry or 0))
        result = ctypes.c_int64()
        array = (ctypes.c_int64 * len(slots))(*slots)
        error = self.library.emulation_call(name.encode(), array, ctypes.c_int64(len(slots)), ctypes.byref(result))
        if error is not None:
            raise RuntimeError(error.decode())
        assert result.value != -1, f"{name}: {len(slots)} slots are not what it takes"
        return result.value

    def decode(self, *arguments: object) -> None:
        self.call("decode", *arguments)

    def late(self, tensor: torch.Tensor, launches: int = 1) -> None:
        """`tensor` (dense) is not there before the next kernels' pdl_wait; what they write before it is lost."""
        size = tensor.numel() * tensor.element_size()
        if size:
            self.library.emulation_late(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(size), launches)


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++"))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    return compile_emulation(compiler, tmp_path_factory.mktemp("emulation"))


@pytest.fixture
def emulated(emulated_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """Decode of CPU tensors goes the way of CUDA tensors, to the emulated kernels."""
    monkeypatch.delenv("HPC_PDL", raising=False)
    kernels = Emulated(emulated_library)
    module = importlib.import_module("hpc_attention.decode")
    monkeypatch.setattr(module, "_op", module._decode_cuda)
    monkeypatch.setattr(_cuda, "_C", kernels)
    cuda = SimpleNamespace(
        current_stream=lambda device: SimpleNamespace(cuda_stream=0), is_current_stream_capturing=lambda: kernels.early
    )
    monkeypatch.setattr(_cuda, "torch", SimpleNamespace(cuda=cuda))
    yield kernels
    kernels.library.emulation_set_fault(0)
    kernels.library.emulation_forget_late()


def run(kernels: Emulated, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode right behind kernels that write the query and this step's tokens, and use output and workspace themselves.

    Both lie between canaries and hold what is of no use.
    """
    cache, plan, q_len = inputs.cache, inputs.plan, inputs.problem.q_len
    out = Canary(tuple(inputs.q.shape), FP16 if inputs.q.dtype == FP16 else BF16, guard=1 << 16)
    workspace = Canary((plan.workspace_bytes,), guard=1 << 16)
    plan.workspace = dirty_(workspace.tensor, seed=1)
    kernels.late(inputs.q)
    for memory in (fill_nan_(out.tensor), workspace.tensor):
        kernels.late(memory, launches=2)
    if not kernels.early:
        kernels.late(plan.map)
    for request, length in enumerate(cache.seq_lens.tolist()):
        for slot in cache.slots(request)[max(length - q_len, 0) :].tolist():
            for rows in (cache.k_cache, cache.v_cache):
                for row in rows[slot // cache.page_size, slot % cache.page_size]:
                    kernels.late(row)
    result = inputs.run(out=out.tensor)
    out.check()
    workspace.check()
    return result


PROBLEMS = {
    "bf16": SMALL,
    "fp16": replace(SMALL, q_dtype=FP16),
    "e4m3": replace(SMALL, kv_dtype=FP8),
    "e4m3 and fp16": replace(SMALL, q_dtype=FP16, kv_dtype=FP8),
    "e4m3 query": replace(SMALL, q_dtype=FP8, k_scale="token", v_scale="head"),
    "D 64": replace(SMALL, head_dim=64, num_q_heads=10),
    "D 64 e4m3": replace(SMALL, head_dim=64, kv_dtype=FP8, num_q_heads=32, q_len=2),
    "D 256": replace(SMALL, head_dim=256, q_len=2),
    "D 256 e4m3": replace(SMALL, head_dim=256, kv_dtype=FP8, num_q_heads=32, q_len=2),
    "ratio 1": replace(SMALL, num_q_heads=2),
    "ratio 16": replace(SMALL, num_q_heads=32),
    "ratio 5, q_len 3": replace(SMALL, num_q_heads=10, q_len=3, q_dtype=FP16),
    "128 rows": replace(SMALL, lengths=(100,), num_q_heads=16, num_kv_heads=1, q_len=8, kv_dtype=FP8),
    "pages of 1": replace(SMALL, page_size=1, kv_dtype=FP8, k_scale="token", layout="HND"),
    "pages of 16": replace(SMALL, page_size=16, layout="uneven"),
    "pages of 256": replace(SMALL, page_size=256, layout="interleaved", kv_dtype=FP8),
    "window": replace(SMALL, lengths=(300, 65, 500), window=70, q_len=3),
    "softcap and sinks": replace(SMALL, softcap=8.0, sinks=True, k_scale="head", v_scale="float"),
    "one long request": replace(LONG, lengths=(1500,), kv_dtype=FP8, num_ctas=20, sinks=True, k_scale="one"),
    "few and many pieces": replace(LONG, lengths=(4500, 300, 7, 200, 1500), num_q_heads=2, kv_dtype=FP8, num_ctas=64),
    "more than 128 pieces": replace(LONG, lengths=(9000,), num_q_heads=1, head_dim=64, kv_dtype=FP8, num_ctas=141),
    "runs over several requests": LATER,
    "solo pieces, then a shared one": replace(LONG, lengths=(60, 100, 20, 1100, 9, 80), num_ctas=1),
    "nine solo pieces": SOLOS,
    "many pairs in two pieces": PAIRS,
    "pages of one token": SMALL_PAGES,
    "many pieces a CTA": MANY,
    "many pieces a CTA, e4m3": replace(MANY, kv_dtype=FP8, num_ctas=2, q_len=2, softcap=5.0, sinks=True),
    "teams of warps": TEAMS,
    "teams, fp16, window": replace(TEAMS, q_dtype=FP16, kv_dtype=FP16, window=150, q_len=1),
    "teams, bf16, pages of 16, softcap": replace(TEAMS, kv_dtype=BF16, page_size=16, softcap=8.0, sinks=True),
    "teams, pages of 1, scales of tokens": replace(TEAMS, q_dtype=FP8, page_size=1, k_scale="token", v_scale="head"),
    "teams, many pieces a CTA": replace(
        TEAMS, lengths=(*range(1, 130, 4), 700, 0, 200), num_kv_heads=2, q_len=1, num_q_heads=32, num_ctas=2
    ),
    "teams, pieces of three tiles": replace(TEAMS, lengths=(1100, 0, 70), num_ctas=7, sm_scale=0.05),
    "teams, window": replace(TEAMS, lengths=(1500, 200), window=333, num_ctas=5),
    "teams, batch-invariant": replace(TEAMS, lengths=(1300, 65, 0, 1), batch_invariant=True),
    "many pieces a CTA, 16 rows": replace(MANY, lengths=MANY.lengths[::2], kv_dtype=FP8, num_q_heads=32),
    "one CTA": replace(SMALL, lengths=(300, 5, 0, 90), num_ctas=1, kv_dtype=FP8),
    "batch-invariant": replace(SMALL, lengths=(1100, 65, 0, 1), batch_invariant=True, q_len=2, kv_dtype=FP8),
    "no tokens at all": replace(SMALL, lengths=(0, 0)),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_on_a_cpu(emulated: Emulated, name: str) -> None:
    """Inside the kernels' error bound; with NaN in page tails, in a dirty workspace, ahead of their predecessor."""
    inputs = PROBLEMS[name].make()
    inputs.check(*run(emulated, inputs), kernel=True)


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("early_slices", [1, 4])
def test_settings_for_measurements(
    emulated: Emulated, monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype, early_slices: int
) -> None:
    """Slices of the other size, and any number of them before the wait, give the same."""
    inputs = replace(MANY, head_dim=128, lengths=MANY.lengths[::3], kv_dtype=kv_dtype, num_ctas=2).make()
    settings = {"stages": 4 if kv_dtype == FP8 else 1, "early_slices": early_slices}
    monkeypatch.setattr(_cuda, "decode", functools.partial(_cuda.decode, **settings))
    inputs.check(*run(emulated, inputs), kernel=True)


@pytest.mark.parametrize("name", ["bf16", "e4m3", "batch-invariant", "teams of warps"])
def test_right_behind_an_update(emulated: Emulated, name: str) -> None:
    """A decode that may not start early reads the map behind its wait, too."""
    emulated.early = False
    inputs = PROBLEMS[name].make()
    inputs.check(*run(emulated, inputs), kernel=True)


@pytest.mark.parametrize("number", range(1, len(FAULTS) + 1), ids=FAULTS)
def test_planted_fault_is_noticed(emulated: Emulated, number: int) -> None:
    fault = list(FAULTS.values())[number - 1]
    assert (CSRC / "kernels" / fault.file).read_text().count(fault.right) == 1, "plant the fault in the new code"
    inputs = fault.problem.make()
    inputs.check(*run(emulated, inputs), kernel=True)
    emulated.library.emulation_set_fault(number)
    with pytest.raises((AssertionError, RuntimeError), match=r"^out: |^lse: |^emulation: "):
        inputs.check(*run(emulated, inputs), kernel=True)


def test_order_of_threads_changes_no_bit(emulated: Emulated) -> None:
    """Every run scrambles warps and lanes anew."""
    inputs = replace(SMALL, kv_dtype=FP8, lengths=(400, 70), num_ctas=5).make()
    want, want_lse = run(emulated, inputs)
    for _ in range(3):
        out, lse = run(emulated, inputs)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_batch_invariant_rows_in_any_company(emulated: Emulated) -> None:
    problem = replace(SMALL, lengths=(600, 3, 1100, 70), batch_invariant=True, max_seq_len=2048)
    inputs = problem.make()
    out, _ = run(emulated, inputs)
    for request in (0, 2):
        plan = DecodePlan(1, 8, 2, 128, 64, batch_invariant=True, max_seq_len=2048, num_ctas=4, device="cpu")
        plan.update(inputs.cache.seq_lens[request : request + 1].contiguous())
        rows = slice(request, request + 1)
        alone, _ = inputs.run(q=inputs.q[rows], page_table=inputs.cache.page_table[rows], plan=plan)
        assert torch.equal(alone, out[rows])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "lengths",
    [(), (1,), (5000, 0, 64, 65, 1), tuple(range(0, 3000, 17)), (700,) * 1100],
    ids=lambda lengths: len(lengths),
)
def test_plan_kernel_writes_the_hosts_map(
    emulated: Emulated, lengths: tuple[int, ...], window: int | None, batch_invariant: bool
) -> None:
    plan = DecodePlan(
        1200, 8, 2, 128, 64, q_len=2, window=window, batch_invariant=batch_invariant, max_seq_len=4500, num_ctas=132,
        device="cpu",
    )  # fmt: skip
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    plan.update(seq_lens.clamp(max=4500))
    written = dirty_(torch.empty_like(plan.map))
    emulated.late(seq_lens)
    emulated.late(written)
    emulated.call("update_plan", seq_lens.data_ptr(), len(lengths), written.data_ptr(), *plan._shape())
    assert torch.equal(written, plan.map)
