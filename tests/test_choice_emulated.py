"""The router's choice of experts without a GPU: its own source on hpc-attention's emulation of thread blocks.

emulation/choice.cpp holds it to a plain sort, bit for bit; each planted fault must be noticed.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "packages/hpc-attention/tests/emulation"
CSRC = ROOT / "packages/hpc-router-gemm/csrc"
PDL = "#pragma once\nnamespace hpc { inline void pdl_wait() { emulation::wait_for_predecessor(); }\n"
PDL += "inline void pdl_trigger() {} }\n"
# number -> (text of the kernel, the same with the fault)
FAULTS = {
    # The bound is one pair too high; it leaves itself out.
    1: ("before == p.k - 1", "before == p.k - (emulation::fault == 1 ? 2 : 1)"),
    2: ("candidate >= least) s.found", "candidate >= least + (emulation::fault == 2)) s.found"),
    # NaN comes first; ties of groups go to the higher, ties of experts too.
    3: ("value == value ? key : 1", "value == value ? key : (emulation::fault == 3 ? 0xFFFFFFFFu : 1u)"),
    4: ("mine && g < lane", "mine && (emulation::fault == 4 ? g > lane : g < lane)"),
    5: ("~static_cast<uint32_t>(id);", "(emulation::fault == 5 ? id + 1u : ~static_cast<uint32_t>(id));"),
    # A probability of a probability; a group's best counts twice; of many groups none is left out.
    6: ("of_probabilities ? v", "of_probabilities && emulation::fault != 6 ? v"),
    7: ("lane == winner ? second", "lane == winner && emulation::fault != 7 ? second"),
    8: ("if (last_group.before(", "if (emulation::fault != 8 && last_group.before("),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++"))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("choice")
    text = (CSRC / "kernels/router_topk.cuh").read_text()
    groups = "extern __shared__ float group_values[];"
    assert groups in text
    text = text.replace(groups, "auto* group_values = reinterpret_cast<float*>(emulation::shared_memory());")
    for right, wrong in FAULTS.values():
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    (folder / "kernels").mkdir()
    (folder / "kernels/router_topk.cuh").write_text(text)
    (folder / "hpc").mkdir()
    (folder / "hpc/pdl.cuh").write_text(PDL)
    flags = ["-std=c++20", "-O1", "-w", "-U_FORTIFY_SOURCE", "-include", str(EMULATION / "cuda_runtime.h")]
    flags += [f"-I{path}" for path in (folder, EMULATION, CSRC, ROOT / "common/include")]
    sources = [
        ROOT / "tests/emulation/choice.cpp",
        *(EMULATION / f"{name}.cpp" for name in ("block", "copies", "races")),
    ]
    subprocess.run([compiler, *flags, *sources, "-o", folder / "choice"], check=True, timeout=300)
    return folder / "choice"


def run(program: Path, fault: int, problems: int) -> subprocess.CompletedProcess[str]:
    arguments = [program, *map(str, (fault, 1, problems))]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300)


def test_choice_equals_a_sort(program: Path) -> None:
    done = run(program, 0, 60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(program: Path, fault: int) -> None:
    assert run(program, fault, 100).returncode == 1
