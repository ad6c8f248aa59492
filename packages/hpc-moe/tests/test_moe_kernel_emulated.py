"""The grouped GEMMs, the reduction and the low regime's routing on a CPU, against an emulation of thread blocks.

emulation/emulation.hpp says what is emulated and what is not. Planted faults must be found.
"""

import pathlib
import re
import shutil
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent
CSRC = HERE.parent / "csrc"
# What is PTX in the kernels' own files, and what takes its place.
PTX = (
    (r'asm volatile\("setmaxnreg[^;]*;"[^;]*\);', ""),
    (r'asm volatile\("cp\.async\.bulk\.prefetch[^;]*;"(?:[^;]|;(?=\"))*?"memory"\);', ""),
    (r'asm volatile\("prefetch\.global[^;]*;"[^;]*\);', ""),
    (r'asm volatile\("createpolicy[^;]*;"[^;]*\);', "policy = 3;"),
    (r'asm volatile\("st\.global[^;]*\.v2\.[^;]*;"[^;]*\);', "*static_cast<uint2*>(to) = v;"),
    (r'asm volatile\("st\.global[^;]*\.v4\.[^;]*;"[^;]*\);', "*static_cast<uint4*>(to) = v;"),
    # What is dropped is lost.
    (r'asm volatile\("discard[^;]*;"[^;]*\);', "std::memset(const_cast<void*>(line), 0xEE, 128);"),
    (r'asm\("min\.NaN[^;]*;"[^;]*\);', "v = a != a || b != b ? NAN : (a < b ? a : b);"),
    (r'asm\("max\.NaN[^;]*;"[^;]*\);', "v = a != a || b != b ? NAN : (a > b ? a : b);"),
    (r'asm\("ex2[^;]*;"[^;]*"f"\((.*?)\)\);', r"power = std::exp2(\1);"),
    (r'asm\("rcp[^;]*;"[^;]*"f"\((.*?)\)\);', r"inverse = 1.0f / (\1);"),
)
# number -> (text in the kernels, the same with the fault); each must be found in some case.
FAULTS = {
    1: ("full, k * 128, 0, 0, row", "full, (emulation::fault == 1 && k == 1 ? 0 : k * 128), 0, 0, row"),
    2: ("s.token[row]", "s.token[emulation::fault == 2 && row > 0 ? row - 1 : row]"),
    # The weights loaded ahead of the index are taken for another task's.
    3: ("if (first.expert != guess.expert ||", "if (emulation::fault != 3) if (first.expert != guess.expert ||"),
    # The second tile's rows are the first's.
    4: ("row_to_slot[tile_row + rows + thread]", "row_to_slot[tile_row + (emulation::fault == 4 ? 0 : rows) + thread]"),
    # The up rows get the gate's scale.
    5: ("* weights[m]", "* weights[emulation::fault == 5 ? 0 : m]"),
    # Routing: pairs of the steps before do not count; of few pairs, a tile is never full.
    6: ("own[expert] += __popc(same);", "own[expert] += emulation::fault == 6 ? 0 : __popc(same);"),
    7: ("rank % kLowTile == 0;", "(emulation::fault == 7 ? rank : rank % kLowTile) == 0;"),
    # Both CTAs of a cluster bring the same unit.
    8: ("(p, 0, mine);", "(p, 0, emulation::fault == 8 ? 0 : mine);"),
    # The other CTA's largest magnitudes do not count; both halves of a unit are its first; gate's scale for up again.
    9: ("theirs(s)[thread]", "(emulation::fault == 9 ? 0.0f : theirs(s)[thread])"),
    10: ("(units - kHalfUnit) * 4", "(emulation::fault == 10 ? 0 : units - kHalfUnit) * 4"),
    # Kept rows: the next pair's weights are the first's; the next task's rows overwrite the ones that are multiplied.
    12: (
        "weights += weight_coordinate<T>(p, 0, 2);",
        "weights += emulation::fault == 12 ? 0 : weight_coordinate<T>(p, 0, 2);",
    ),
    13: ("s.rows[last % 2]", "s.rows[emulation::fault == 13 ? 0 : last % 2]"),
    # The reduction drops a line that has not been read.
    14: ("static_cast<int64_t>(read) *", "static_cast<int64_t>(emulation::fault == 14 && read ? read - 1 : read) *"),
    # Panels: the first one's weights; their scales; the place in out; that in shared_output.
    15: ("w2) + first * row_bytes", "w2) + (emulation::fault == 15 ? 0 : first) * row_bytes"),
    16: ("p.w_scale += static_cast", "if (emulation::fault != 16) p.w_scale += static_cast"),
    17: ("(p.out) + first", "(p.out) + (emulation::fault == 17 ? 0 : first)"),
    18: ("(p.shared_output) + first", "(p.shared_output) + (emulation::fault == 18 ? 0 : first)"),
    # The rows that warpgroups share: the second's are not multiplied; both halves of the odd last unit are its first.
    # Tasks of several tiles: the second warpgroup multiplies the first's rows; it has none.
    21: ("group ? task.rows * 128", "group && emulation::fault != 21 ? task.rows * 128"),
    22: ("1, rows - tile.rows)", "1, emulation::fault == 22 ? 0 : rows - tile.rows)"),
    19: ("second = tile.rows - tile.width;", "second = emulation::fault == 19 ? 0 : tile.rows - tile.width;"),
    20: ("T::kOddHalves ? units(at) : 1", "T::kOddHalves ? (emulation::fault == 20 ? kHalfUnit : units(at)) : 1"),
    # Tasks of three units: both warpgroups have the first half of the third; both store it as the first.
    23: ("2 * (row + 8) + 4 * group", "2 * (row + 8) + 4 * (emulation::fault == 23 ? 0 : group)"),
    24: ("(task.unit + 2) * 64 + group * 32", "(task.unit + 2) * 64 + (emulation::fault == 24 ? 0 : group * 32)"),
    # Short rows: a line comes twice; odd rows are multiplied as even ones; h has its first columns twice; so do scales.
    31: ("row + 4 * u, j, policy", "row + 4 * u, emulation::fault == 31 && j == 1 ? 0 : j, policy"),
    32: ("m * (kShortK / 32) + step;", "(emulation::fault == 32 ? 0 : m) * (kShortK / 32) + step;"),
    33: ("half * 128, row", "(emulation::fault == 33 ? 0 : half) * 128, row"),
    34: ("scales + g * T::kWidth", "scales + (emulation::fault == 34 ? 0 : g) * T::kWidth"),
    # A warp's copy of up rows is gate's; its rows of h beyond the first round are the first's.
    25: ("up = part % 2;", "up = emulation::fault == 25 ? 0 : part % 2;"),
    26: ("tile_row + row + (row", "tile_row + (emulation::fault == 26 ? row % 32 : row) + (row"),
    # Three blocks of rows: the first CTA's third block is the second; both halves of its columns are the first; the
    # other CTA's largest magnitudes do not count; nor does the parity of such tasks.
    27: ("if (thread >= 64) row += gap;", "if (thread >= 64 && emulation::fault != 27) row += gap;"),
    28: ("at_b + blockIdx.x % 2 * ", "at_b + (emulation::fault == 28 ? 0 : blockIdx.x % 2) * "),
    29: ("fmaxf(of_third[h], there[group][at])", "fmaxf(of_third[h], emulation::fault == 29 ? 0 : there[group][at])"),
    30: ("before / 2 % 2);", "emulation::fault == 30 ? 0 : before / 2 % 2);"),
    # Spread rows: the scales are the other order's; a thread's third row is its first; it is stored elsewhere.
    35: ("scale_place(shared_row<T>(thread))", "scale_place(emulation::fault == 35 ? thread : shared_row<T>(thread))"),
    36: ("at_a + kBlock +", "at_a + (emulation::fault == 36 ? 0 : kBlock) +"),
    37: ("64 + row_in_tile<T>(", "64 + (emulation::fault == 37 ? 0 : 1) * row_in_tile<T>("),
    11: ("weight_scales[first + m]", "weight_scales[emulation::fault == 11 ? 0 : first + m]"),
}
ROUTING = (6, 7)
FAULTY = (
    "tensor,450,1,1,256,256,3,one,0,32",
    "tensor,40,1,1,256,192,12,one,0,32",
    "tensor,300,2,3,256,256,4,random,0,128,clusters",
    "block,300,2,3,256,256,4,random,0,128,clusters",
    "block,300,2,3,1024,192,2,random,1,128,clusters",
    "tensor,270,1,2,256,192,2,one,0,96,even",
    "block,180,1,1,128,1024,2,one,0,128,threes",
)
SPREAD = ("block,90,1,2,512,256,1,one,0,128,tokens", "block,80,1,2,512,192,2,one,0,128,tokens")
CASES = (
    "tensor,9,2,3,256,192,2,random,0,32",
    "tensor,5,2,2,384,64,3,random,1,128",
    "tensor,4,2,3,128,64,2,none,0,64",
    "tensor,129,1,2,256,192,3,one,0,128",
    "tensor,129,1,2,256,192,2,one,0,64",
    "tensor,70,1,2,896,192,2,one,0,32",
    "tensor,270,1,2,128,192,2,one,0,128",
    "tensor,70,1,2,256,192,9,one,0,32",
    "tensor,60,8,40,128,64,2,random,0,32",
    "tensor,70,2,3,640,320,5,random,0,64",
    "tensor,50,2,3,896,384,5,random,0,32",
    # Pairs that are split into units and into halves of them, with fp32 sums of an odd number of units too.
    "tensor,40,1,1,256,192,12,one,0,32",
    "tensor,50,1,2,384,192,14,one,0,64",
    "tensor,60,1,2,384,256,9,one,0,32",
    "tensor,9,2,3,256,128,14,random,0,32",
    "tensor,40,1,1,256,640,4,one,0,64",
    "tensor,100,1,1,256,384,7,one,0,128",
    # Tasks of a unit and several tiles, of an expert of very many rows.
    "tensor,450,1,1,256,256,3,one,0,32",
    "tensor,450,1,1,256,256,9,one,0,32",
    "tensor,610,1,1,384,256,7,one,1,64",
    "tensor,601,1,1,256,384,11,one,0,64",
    "block,40,2,3,256,192,2,random,0,32",
    "block,90,1,2,256,192,2,one,0,64",
    "block,130,1,2,256,256,4,one,0,128",
    "block,75,1,2,256,128,2,one,0,128",
    "block,75,1,2,896,128,2,one,0,32",
    "none,60,2,3,128,192,3,random,0,128",
    "block,190,2,2,256,192,3,random,0,128,tokens",
    "block,150,1,2,256,256,3,one,0,128,tokens",
    "block,50,1,2,640,192,3,one,0,128,tokens",
    "block,50,1,2,128,128,1,one,0,128,tokens",
    "block,330,1,2,256,128,2,one,0,128,tokens",
    "block,130,1,2,384,64,2,one,0,128,tokens",
    # Of 65 to 96 rows: in down a unit a warpgroup.
    *SPREAD,
    "block,70,1,2,256,128,1,one,0,128,tokens",
    "block,96,1,1,384,128,2,one,0,128,tokens",
    # Not shared out so, but where scale groups are of 64.
    "block,90,1,2,512,256,1,one,1,128,tokens",
    "block,300,2,3,256,128,2,random,1,128,tokens",
    "block,70,1,2,256,192,1,one,1,128,tokens",
    "tensor,300,2,3,256,256,4,random,0,128,clusters",
    "tensor,270,1,2,384,192,2,one,0,128,clusters",
    "tensor,129,1,2,128,128,4,one,1,128,clusters",
    "tensor,30,1,2,640,64,2,random,0,128,clusters",
    "tensor,9,2,3,256,192,6,random,0,128,clusters",
    "block,300,2,3,256,256,4,random,0,128,clusters",
    "block,270,1,2,384,192,2,one,0,128,clusters",
    "block,30,1,2,640,64,2,random,0,128,clusters",
    "tensor,270,1,2,384,192,2,one,0,128,even",
    "tensor,300,2,3,256,256,4,random,0,128,even",
    # Tasks of three units.
    "tensor,270,1,2,256,192,2,one,0,96,even",
    "tensor,300,2,3,384,192,4,random,0,96,even",
    "tensor,30,2,3,128,192,6,random,1,96,even",
    "tensor,190,1,1,128,384,4,one,0,96,even",
    # Rows of h kept for several pairs of units, in more tasks than CTAs, with an odd unit left; in few tasks.
    "block,300,2,3,1024,192,2,random,1,128,clusters",
    "block,400,1,2,1152,64,4,one,1,128,clusters",
    "block,200,1,2,768,192,2,one,1,128,clusters",
    "block,150,1,1,256,64,8,one,1,128,clusters",
    # Three blocks of rows shared by a cluster: more than once, of few rows, of a single group of K; beside others.
    "block,180,1,1,640,1024,2,one,0,128,threes",
    "block,129,1,2,128,256,4,one,0,128,threes",
    "block,192,1,2,256,320,2,one,0,128,threes",
    "block,300,2,3,256,256,4,random,0,128,threes",
    "block,310,1,1,384,192,2,one,0,128,threes",
    "block,180,1,1,2048,192,2,one,1,128,threes",
    # One CTA of a cluster has a task alone.
    "block,270,1,1,1024,128,2,one,0,128,clusters",
)


def sources(folder: pathlib.Path) -> None:
    """Copies of the kernels with what is PTX replaced and the faults planted."""
    shutil.copytree(CSRC / "kernels", folder / "kernels")
    planted = set()
    for path in [*(folder / "kernels").rglob("*.cuh"), folder / "kernels" / "panels.hpp"]:
        text = path.read_text().replace("extern __shared__", "extern")
        for pattern, stand_in in PTX:
            text = re.sub(pattern, stand_in, text, flags=re.DOTALL)
        for number, (right, wrong) in FAULTS.items():
            if right in text:
                planted.add(number)
                text = text.replace(right, wrong)
        path.write_text(text)
    assert planted == set(FAULTS)


def cuda_headers() -> pathlib.Path | None:
    """Where nvcc says its toolkit's headers are."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-E", "/dev/null"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", said, re.MULTILINE)
    folder = pathlib.Path(top[1].strip()) / "include" if top else None
    return folder if folder and (folder / "cuda_fp8.h").is_file() else None


def build(folder: pathlib.Path, driver: str) -> pathlib.Path:
    """A driver with the kernels."""
    compiler, headers = shutil.which("g++"), cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("needs g++ and CUDA's headers beside nvcc")
    sources(folder)
    includes = [HERE / "emulation", folder, CSRC, HERE.parents[2] / "common" / "include", headers]
    command = [compiler, "-std=c++20", "-O1", "-w", *(f"-I{each}" for each in includes)]
    files = [HERE / "emulation" / name for name in (f"{driver}.cpp", "emulation.cpp")]
    subprocess.run([*command, *files, "-o", folder / "driver"], check=True, timeout=300)
    return folder / "driver"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build(tmp_path_factory.mktemp("emulated"), "driver")


@pytest.fixture(scope="module")
def route(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build(tmp_path_factory.mktemp("route"), "route")


def run(program: pathlib.Path, fault: int, *cases: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(fault), *cases], capture_output=True, text=True, timeout=300)


def test_each_kernel_against_double_precision(program: pathlib.Path) -> None:
    done = run(program, 0, *CASES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_routing_of_the_low_regime(route: pathlib.Path) -> None:
    """Rows in pair order, tiles of 8, ids of other ranks: one warp's routing (to 32 pairs) and the CTA's."""
    sizes = [(1, 1, 100), (8, 192, 100), (32, 3, 100), (32, 24, 60), (31, 512, 90), (17, 2, 0), (33, 6, 100)]
    sizes += [(128, 192, 90), (500, 6, 100), (1024, 512, 95), (1024, 1, 100), (1000, 24, 50), (1024, 128, 100)]
    done = run(route, 0, *(",".join(map(str, size)) for size in sizes))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("fault", ROUTING)
def test_a_planted_fault_of_the_routing_is_found(route: pathlib.Path, fault: int) -> None:
    assert run(route, fault, "500,6,100", "32,3,100").returncode == 1


@pytest.mark.parametrize("fault", [number for number in FAULTS if number not in ROUTING])
def test_a_planted_fault_is_found(program: pathlib.Path, fault: int) -> None:
    cases = (CASES[0], CASES[6], CASES[8], CASES[12], *FAULTY, "block,75,1,2,256,128,2,one,0,128")
    if fault == 34:
        cases = ("block,40,2,3,256,192,2,random,0,32",)
    elif fault > 34:
        cases = SPREAD
    elif fault > 30:
        cases = CASES[:1]
    # Wrong results, or misuse of a barrier that the emulation notices first, by the order of threads.
    assert run(program, fault, *cases).returncode in (1, 3)
