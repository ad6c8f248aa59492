"""The decode kernels' arithmetic without a GPU: their own sources on a CPU emulation of thread blocks.

emulation/block.hpp says what is emulated and what is not. The kernels, their launchers and csrc/api/decode.cpp are
compiled once a session, with the faults of attention_kernel_faults.py in them, which a number switches on; each of
those must be noticed.
"""

import ctypes
import functools
import importlib
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hpc_attention import DecodePlan, _cuda
from hpc_attention.support import FP8
from hpc_attention.testing import Inputs, Problem
from hpc_common.poison import Canary, dirty_, fill_nan_

sys.path.insert(0, str(Path(__file__).parent))  # tests are no package
from attention_kernel_clusters import CLUSTERS  # noqa: E402
from attention_kernel_faults import (  # noqa: E402
    FAULTS,
    GROUPS,
    LATER,
    LONG,
    MANY,
    PAIRS,
    RACES,
    RUNS,
    SMALL,
    SMALL_PAGES,
    SOLOS,
    TEAMS,
    Fault,
)

pytestmark = pytest.mark.usefixtures("one_thread")
BF16, FP16 = torch.bfloat16, torch.float16
EMULATION = Path(__file__).resolve().parent / "emulation"
CSRC = EMULATION.parents[1] / "csrc"
COMMON = EMULATION.parents[3] / "common" / "include"
# Headers whose functions are PTX, and what such a function looks like; emulation/ptx.hpp stands in for those.
PTX_HEADERS = ("cluster.cuh", "fifo.cuh", "fp8.cuh", "mbarrier.cuh", "mma.cuh", "pdl.cuh", "wgmma_half.cuh")
FUNCTION = re.compile(r"^(?:template <.*>\n)?__device__ (?:.*\n)+?\}\n", re.MULTILINE)
# Slowest first.
SOURCES = (
    "launch/decode_e4m3.cu", "launch/decode_bf16.cu", "launch/decode_fp16.cu", "launch/decode_alone.cu",
    "api/decode.cpp", "launch/decode.cu", "launch/plan.cu",
)  # fmt: skip


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
        text = re.sub(
            r"extern __shared__ .* smem\[\];", "char* const smem = emulation::shared_memory();", file.read_text()
        )
        for number, fault in enumerate((FAULTS | RACES).values(), 1):
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

    sources = [build / "csrc" / name for name in SOURCES] + sorted(EMULATION.glob("*.cpp"))
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
    kernels.library.emulation_forget_late()  # a cluster's call is one kernel, not two
    out.check()
    workspace.check()
    return result


PROBLEMS = (
    RUNS
    | CLUSTERS
    | {
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
        "few and many pieces": replace(
            LONG, lengths=(4500, 300, 7, 200, 1500), num_q_heads=2, kv_dtype=FP8, num_ctas=64
        ),
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
        "teams, pages of 1, scales of tokens": replace(
            TEAMS, q_dtype=FP8, page_size=1, k_scale="token", v_scale="head"
        ),
        "teams, many pieces a CTA": replace(
            TEAMS, lengths=(*range(1, 130, 4), 700, 0, 200), num_kv_heads=2, q_len=1, num_q_heads=32, num_ctas=2
        ),
        "teams, pieces of three tiles": replace(TEAMS, lengths=(1100, 0, 70), num_ctas=7, sm_scale=0.05),
        "teams, window": replace(TEAMS, lengths=(1500, 200), window=333, num_ctas=5),
        "teams, few and many pieces": replace(TEAMS, lengths=(4500, 300, 7, 200, 1500), num_ctas=64),
        "teams, more than 64 pieces": replace(TEAMS, lengths=(9000,), num_ctas=141),
        "teams, 24 rows in two pieces": replace(TEAMS, lengths=(300,) * 4, num_q_heads=8, q_len=3, num_ctas=10),
        "teams, batch-invariant": replace(TEAMS, lengths=(1300, 65, 0, 1), batch_invariant=True),
        "many pieces a CTA, 16 rows": replace(MANY, lengths=MANY.lengths[::2], kv_dtype=FP8, num_q_heads=32),
        "heads abreast, by fours": replace(GROUPS, lengths=(400, 0, 400), num_ctas=4),
        "heads abreast, by eights": replace(GROUPS, kv_dtype=BF16, q_len=2),
        "heads abreast, three": replace(GROUPS, num_kv_heads=3, num_q_heads=6, v_scale="float"),
        "heads abreast, more than a block of slices": replace(GROUPS, lengths=(2300,), num_ctas=2, page_size=32),
        "heads one by one, for they have sinks": replace(GROUPS, sinks=True, k_scale="head", v_scale="head"),
        "one CTA": replace(SMALL, lengths=(300, 5, 0, 90), num_ctas=1, kv_dtype=FP8),
        "batch-invariant": replace(SMALL, lengths=(1100, 65, 0, 1), batch_invariant=True, q_len=2, kv_dtype=FP8),
        "no tokens at all": replace(SMALL, lengths=(0, 0)),
    }
)
# Two and four row tiles, CTAs with one piece and with many, whole and cut.
SPREAD = replace(SMALL, lengths=(1, 64, 700, 0, 130, 65), num_q_heads=32, num_ctas=132)
for kind, kv_dtype in (("bf16", BF16), ("e4m3", FP8)):
    PROBLEMS |= {
        f"teams, {kind}, {name}": replace(SPREAD, kv_dtype=kv_dtype, **changes)
        for name, changes in {
            "16 rows": {},
            "32 rows": {"q_len": 2},
            "12 rows, pages of 16": {"num_q_heads": 24, "page_size": 16},
            "32 rows, window": {"q_len": 2, "lengths": (3000, 65, 1), "window": 70, "softcap": 8.0, "sinks": True},
            "16 rows, 4 CTAs": {"num_ctas": 4},
        }.items()
    }


@pytest.mark.parametrize(
    ("kind", "head_dim", "rows", "heads", "longest", "ctas"),
    [
        (0, 128, 8, 1, 4096, 16), (2, 128, 1, 1, 1, 16), (0, 128, 9, 1, 4096, 0), (0, 128, 8, 1, 4097, 0),
        (0, 64, 8, 1, 4096, 0), (0, 256, 8, 1, 4096, 0), (2, 128, 8, 7, 64, 0), (2, 128, 8, 8, 4096, 64),
        (2, 128, 8, 8, 4097, 0), (2, 128, 8, 9, 4096, 0), (2, 128, 8, 15, 2240, 120), (2, 128, 8, 15, 2241, 0),
        (2, 128, 8, 16, 64, 0), (0, 128, 8, 8, 2112, 64), (1, 128, 8, 8, 2113, 0), (2, 128, 9, 8, 64, 0),
    ],
)  # fmt: skip
def test_which_plans_of_one_request_have_clusters(
    emulated: Emulated, kind: int, head_dim: int, rows: int, heads: int, longest: int, ctas: int
) -> None:
    assert emulated.call("decode_cluster_ctas", 0, kind, head_dim, rows, heads, longest) == ctas


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_on_a_cpu(emulated: Emulated, name: str) -> None:
    """Inside the kernels' error bound; with NaN in page tails, in a dirty workspace, ahead of their predecessor."""
    inputs = PROBLEMS[name].make()
    inputs.check(*run(emulated, inputs), kernel=True)


def test_query_of_one_large_element(emulated: Emulated) -> None:
    """Wherever it is: a bf16 query against an e4m3 cache goes through fp16, scaled by its largest element."""
    inputs = Problem(lengths=(70,) * 16, kv_dtype=FP8, num_ctas=4).make()
    request, head = torch.meshgrid(torch.arange(16), torch.arange(8), indexing="ij")
    inputs.q *= 2.0**-12
    inputs.q[request, head, 8 * request + head] = 20.0
    inputs.check(*run(emulated, inputs), kernel=True)


def test_which_plans_leave_half_of_the_sms(emulated: Emulated) -> None:
    # max_batch, heads, longest, min_tiles
    yes = [(1, 1, 33792, 2), (1, 8, 4096, 2), (1, 1, 16896, 1), (0, 1, 64, 1), (66, 1, 256, 1)]
    no = [(1, 1, 33793, 2), (2, 8, 4096, 2), (1, 1, 16897, 1), (67, 1, 64, 2)]
    assert [emulated.call("leaves_half", *plan) for plan in yes + no] == [1] * len(yes) + [0] * len(no)


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


@pytest.mark.parametrize(
    "name", ["bf16", "e4m3", "batch-invariant", "teams of warps", "a cluster", "alone", "alone, heads, pages of 32"]
)
def test_right_behind_an_update(emulated: Emulated, name: str) -> None:
    """A decode that may not start early reads the map behind its wait, too."""
    emulated.early = False
    inputs = PROBLEMS[name].make()
    inputs.check(*run(emulated, inputs), kernel=True)


@pytest.mark.parametrize("name", [*FAULTS, *RACES])
def test_planted_fault_is_noticed(emulated: Emulated, name: str) -> None:
    """Those of RACES as races: the error says who, what and where."""
    faults = FAULTS | RACES
    fault = faults[name]
    assert (CSRC / "kernels" / fault.file).read_text().count(fault.right) == 1, "plant the fault in the new code"
    inputs = fault.problem.make()
    inputs.check(*run(emulated, inputs), kernel=True)
    emulated.library.emulation_set_fault(list(faults).index(name) + 1)
    race = r"^emulation: a race: (read|write) by thread \d+ after a (read|write) by thread \d+ at shared byte \d+$"
    message = race if name in RACES else r"^out: |^lse: |^emulation: "
    with pytest.raises((AssertionError, RuntimeError), match=message):
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
    [
        (),
        (1,),
        (5000, 0, 64, 65, 1),
        (0, *range(400, 3000, 100), 0, 4100),
        (0, *(256, 448) * 20, 0),
        tuple(range(0, 3000, 17)),
        (700,) * 1100,
        (1024,) * 61,
        (0, *range(1000, 1600, 10), 64, 1),
    ],
    ids=lambda lengths: len(lengths),
)
def test_plan_kernel_writes_the_hosts_map(
    emulated: Emulated, lengths: tuple[int, ...], window: int | None, batch_invariant: bool
) -> None:
    heads = 1 if 57 <= len(lengths) <= 66 else 2  # of one head and 132 CTAs: couples
    plan = DecodePlan(
        1200, 8, heads, 128, 64, q_len=2, window=window, batch_invariant=batch_invariant, max_seq_len=4500,
        num_ctas=132, device="cpu",
    )  # fmt: skip
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    plan.update(seq_lens.clamp(max=4500))
    written = dirty_(torch.empty_like(plan.map))
    emulated.late(seq_lens)
    emulated.late(written)
    emulated.call("update_plan", seq_lens.data_ptr(), len(lengths), written.data_ptr(), *plan._shape())
    assert torch.equal(written, plan.map)
