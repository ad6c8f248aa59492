"""Small calls of one package's kernels, for a sanitizer to watch.

    compute-sanitizer --tool TOOL python3 tests/sanitizer/run.py SITE attention|moe|router [options]

SITE: the folder of `.ci/build_offline.sh SITE`. Needs NumPy and no torch. A line a case: its number, a checksum of the
output (the same in every run, whatever watches), seconds, and the case. Exit status 1 where a call failed. --small
leaves out what is too much for racecheck. `.ci/gpu_sanitizer.sh` runs all tools.
"""

import argparse
import importlib
import sys
import time
import zlib

from device import Gpu, extension


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site")
    parser.add_argument("package", choices=("attention", "moe", "router"))
    parser.add_argument("--part", default="0/1", help="I/N: every N-th case, from the I-th on")
    parser.add_argument("--from", type=int, default=0, dest="first", help="no case before this one")
    parser.add_argument("--only", default="", help="the cases of these numbers: 3,14,15")
    parser.add_argument("--small", action="store_true", help="not the largest cases")
    parser.add_argument(
        "--one-consumer", action="store_true", help="no router tile of two k groups: see DESIGN.md there"
    )
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    only = {int(number) for number in arguments.only.split(",") if number}
    module = importlib.import_module(arguments.package)
    core, gpu = extension(arguments.site, module.PACKAGE), Gpu()
    for number, case in enumerate(module.cases(core)):
        if number % parts != part or number < arguments.first or (arguments.small and case.large):
            continue
        if only and number not in only:
            continue
        if arguments.one_consumer and getattr(case, "fields", {}).get("k_groups") == 2:
            continue
        gpu.seed(number)
        begin = time.perf_counter()
        try:
            found = zlib.crc32(module.run(core, gpu, case).tobytes())
            gpu.free()
        except (RuntimeError, ValueError) as error:
            print(f"FAILED {number} {case}: {error}", flush=True)
            return 1
        print(f"{number:4d} {found:08x} {time.perf_counter() - begin:6.2f} {case}", flush=True)
    print("end", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
