"""What .ci/gpu_sanitizer.sh's logs say: a line a tool and package, and under it the kernels that were reported.

    python3 summary.py OUT [TOOL ...]

Exit status 1 where a tool reported what is not KNOWN, a call failed or gave other bits than alone, or cases (those
alone, too) or (of the tools named) a whole tool is left. KNOWN goes by the kernel alone: of one that has changed since,
read the logs.
"""

import collections
import pathlib
import re
import sys

# Reports that are no errors: (tool, part of the kernel's name) -> why.
ONE_LANE = "one lane arrives for its warp (common/tests/sanitizer_barriers.cu)"
KNOWN = {
    ("initcheck", "moe::gate_up_kernel"): "the guessed tile, loaded before it is known to exist; not used then",
    ("initcheck", "moe::low_quantise_kernel<1,"): "rows past the live ones are quantised too; nobody reads them",
    ("racecheck", "moe::gate_up_kernel<1,"): "named barriers of halves, or " + ONE_LANE,
    ("racecheck", "moe::gate_up_tokens_kernel"): ONE_LANE,
    ("racecheck", "moe::down_kernel<1,"): ONE_LANE,
    ("racecheck", "moe::down_tokens_kernel"): ONE_LANE,
}


def cases(path: pathlib.Path) -> dict[int, str]:
    """Number and checksum of every case that ended."""
    found = re.findall(r"^ *(\d+) ([0-9a-f]{8}) ", path.read_text(errors="replace"), re.MULTILINE)
    return {int(number): checksum for number, checksum in found}


def ended(path: pathlib.Path) -> bool:
    """Whether all calls were made."""
    return "end" in path.read_text(errors="replace").splitlines()


def reports(path: pathlib.Path) -> collections.Counter[str]:
    """How often each kernel was named, up to the template's end."""
    if not path.exists():
        return collections.Counter({"no log": 1})
    text = path.read_text(errors="replace")
    names = re.findall(r"\bat (?:void )?([\w:]+kernel(?:<.*?>)?)\(", text)
    lines = collections.Counter(
        re.sub(r"hpc::\w+::(?=\w+\)\d)|\((?:int|bool|hpc::[\w:]+)\)", "", name) for name in names
    )
    if not lines and not re.search(r"SUMMARY: 0 (errors|hazards)", text):
        lines["no summary: ended early"] = 1
    return lines


def main() -> int:
    out, asked = pathlib.Path(sys.argv[1]), sys.argv[2:]
    base = {path.name.split(".")[1]: cases(path) for path in out.glob("base.*.txt")}
    cut = sorted(path.name for path in out.glob("base.*.txt") if not ended(path))
    for name in cut:
        print(f"ended early: {name}")
    wrong = len(cut)
    for tool in ("memcheck", "initcheck", "synccheck", "racecheck"):
        for package, alone in sorted(base.items()):
            paths = sorted(out.glob(f"{tool}.{package}.*.txt"))
            if not paths:
                if tool in asked:
                    print(f"{tool:10s}{package:10s} not begun")
                    wrong += 1
                continue
            got = {number: checksum for path in paths for number, checksum in cases(path).items()}
            other = [number for number, checksum in got.items() if alone.get(number, checksum) != checksum]
            failed = [line for path in paths for line in re.findall("FAILED.*", path.read_text(errors="replace"))]
            said = sum((reports(path.with_suffix(".log")) for path in paths), collections.Counter())
            early = [path.name for path in paths if not ended(path)]
            print(f"{tool:10s}{package:10s} {len(got)} of {len(alone)} cases, {len(other)} with other bits")
            for line in (*failed, *(f"ended early: {name}" for name in early)):
                print(f"    {line[:200]}")
            unknown = 0
            for kernel, count in said.most_common():
                why = next((why for (of, name), why in KNOWN.items() if of == tool and name in kernel), "")
                unknown += not why
                print(f"    {count:6d} {kernel}{': ' + why if why else ''}")
            wrong += bool(other or failed or early or unknown)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
