"""Times of compile-time variants of the kernels beside each other, kernel by kernel, and how their outputs differ.

    python packages/hpc-moe/benchmarks/variants.py [--out FOLDER] [--cases hy3-ep8:2048:tensor,...] NAME=FLAGS ...

e.g. ``before@../other/csrc= now= "small=-DHPC_MOE_X=1"``: NAME may be followed by @ and another version's folder csrc;
FLAGS are the compiler's. Needs nvcc and a Hopper GPU, but no Python packages and no installed hpc-moe: every launcher
is compiled once for each folder and set of flags, all at the same time, and linked with variants.cu. The first
variant's outputs are what the others are compared with. A variant that hangs is stopped after a minute. Columns:
microseconds a call, then index, gate-up, down, reduction (none where few tokens take other kernels).
"""

import argparse
import hashlib
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
CSRC = HERE.parent / "csrc"
INCLUDE = HERE.parents[2] / "common" / "include"
NVCC = ["nvcc", "-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a"]
CASES = (
    # Where the low regime ends: with its kernels, and with those of larger calls.
    *(f"hy3-tp8:{tokens}:tensor{mid}" for tokens in (64, 128) for mid in ("", ":mid")),
    *(f"{layer}:tensor{mid}" for layer in ("hy3-ep8:16", "hy3-ep8-global:64", "qwen3-30b:64") for mid in ("", ":mid")),
    *(f"hy3-tp8:{tokens}:tensor" for tokens in (256, 512, 1024, 2048, 4096, 8192)),
    *(f"hy3-ep8:{tokens}:tensor" for tokens in (32, 64, 256, 512, 2048)),
    *(f"hy3-ep8-global:{tokens}:tensor" for tokens in (256, 1024, 4096)),
    *(f"qwen3-30b:{tokens}:tensor" for tokens in (256, 1024, 4096)),
    *(f"hy3-tp8:{tokens}:block" for tokens in (512, 2048, 8192)),
    *(f"hy3-ep8:{tokens}:block" for tokens in (64, 512, 2048)),
    *(f"qwen3-30b:{tokens}:block" for tokens in (256, 1024, 4096)),
)


def compile_one(job: tuple[pathlib.Path, pathlib.Path, str, pathlib.Path]) -> str:
    """Compile a source against a csrc folder, with flags; returns what the compiler said where it failed."""
    source, csrc, flags, to = job
    if to.exists():
        return ""
    command = [*NVCC, *flags.split(), f"-I{INCLUDE}", f"-I{csrc}", "-c", source, "-o", to]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{source.name} {flags}:\n{done.stderr[-2000:]}"


def build(variants: dict[str, tuple[pathlib.Path, str]], out: pathlib.Path) -> None:
    """Compile and link every variant's program, ``out``/NAME; ends the process where one does not compile."""
    jobs, objects = [], {}
    for name, (csrc, flags) in variants.items():
        sources = [HERE / "variants.cu", *sorted((csrc / "launch").glob("*.cu"))]
        key = hashlib.sha256(f"{csrc} {flags}".encode()).hexdigest()[:8]
        objects[name] = [out / f"{source.stem}-{key}.o" for source in sources]
        jobs += [(source, csrc, flags, to) for source, to in zip(sources, objects[name], strict=True)]
    jobs.sort(key=lambda job: "gate_up_" not in job[0].name)  # the longest first
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [said for said in pool.map(compile_one, dict.fromkeys(jobs)) if said]
        if wrong:
            sys.exit("\n".join(wrong))
        link = lambda name: subprocess.run([*NVCC, *objects[name], "-o", out / name], check=True)  # noqa: E731
        list(pool.map(link, variants))


def main() -> int:
    """Command line; exit status 1 where a variant failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", metavar="NAME[@CSRC]=FLAGS")
    parser.add_argument("--out", default="build/variants", help="folder for objects, programs and outputs")
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    variants = {}
    for each in args.variants:
        (name, _, csrc), flags = each.split("=", 1)[0].partition("@"), each.split("=", 1)[1]
        variants[name] = (pathlib.Path(csrc).resolve() if csrc else CSRC, flags)
    out = pathlib.Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    build(variants, out)
    failed = False
    for index, name in enumerate(variants):
        print(f"{name}: {variants[name][1]}", flush=True)
        command = [out / name, out, "save" if index == 0 else "compare", *args.cases.split(",")]
        try:
            failed |= subprocess.run(command, timeout=60).returncode != 0
        except subprocess.TimeoutExpired:
            print("stopped after a minute")
            failed = True
    return failed


if __name__ == "__main__":
    sys.exit(main())
