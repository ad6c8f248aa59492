"""Times of several builds of one package by turns in one run: what a change gains, on a card whose clock drifts.

    python3 common/benchmarks/by_turns.py CASES.py before=SITE after=SITE2:SITE [--only TEXT] [--rounds 9] [--hot]

Each build has a process of its own, whose PYTHONPATH is what stands behind its name (of `.ci/build_offline.sh SITE`);
after a comma may follow environment variables: ``late=SITE,HPC_PDL=0``. CASES.py defines ``cases()``, a dict from a
name to a function that makes a case's (calls, check): the calls of one pass, one a buffer set, and a function that
returns a string, compared between builds (such as a hash of the outputs; or None). A case of a router, say::

    sys.path.insert(0, "packages/hpc-router-gemm/benchmarks")
    import router

    def cases():
        def make():
            one = router.candidates(128, 768, 6144, (3,), torch.device("cuda"))[0]
            return one.calls, lambda: str(one.calls[0]().double().sum().item())

        return {"768x6144 m=128": make}

Prints a line a case: each build's median in microseconds and its difference from the first one's.
"""

import argparse
import gc
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import traceback
from typing import Any


def serve(path: str) -> None:
    """A build's process: answers requests on standard input, one JSON line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    import torch
    from hpc_common.timing import CpuClock, GraphClock

    spec = importlib.util.spec_from_file_location("cases", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))
    spec.loader.exec_module(module)
    table, clock = module.cases(), GraphClock("cuda") if torch.cuda.is_available() else CpuClock()
    answer(cases=list(table))
    calls, check, one_pass = [], None, None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                calls, check, one_pass = [], None, None
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                torch.manual_seed(0)
                calls, check = table[request["case"]]()
                one_pass = clock.prepare([calls[0]] * len(calls) if request["hot"] else calls)
                answer()
            elif request["do"] == "time":
                seconds = clock.seconds(one_pass, request["replays"])
                answer(us=seconds * 1e6 / (request["replays"] * len(calls)))
            elif request["do"] == "check":
                answer(check=check() if check else "")
        except Exception as problem:  # of one case of one build: the others go on
            traceback.print_exc()
            answer(error=f"{type(problem).__name__}: {problem}"[:300])


class Build:
    """One build's process."""

    def __init__(self, text: str, cases: str) -> None:
        self.name, where = text.split("=", 1)
        path, *variables = where.split(",")
        environment = dict(os.environ, PYTHONPATH=path, **dict(each.split("=", 1) for each in variables))
        command = [sys.executable, __file__, "--serve", cases]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def send(self, **request: Any) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"by_turns: the process of {self.name} has ended, see above")
        return json.loads(line)

    def ask(self, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return self.read()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)


def measure_case(case: str, builds: list[Build], options: argparse.Namespace) -> tuple[dict[str, float], list[str]]:
    """Of one case each build's median in microseconds (NaN where it failed), and lines: errors, checks that differ."""
    for build in builds:
        build.send(do="prepare", case=case, hot=options.hot)
    wrong = {build.name: answer["error"] for build in builds if "error" in (answer := build.read())}
    times: dict[str, list[float]] = {build.name: [] for build in builds}
    for turn in range(options.rounds):
        for index in range(len(builds)):
            build = builds[(index + turn) % len(builds)]
            if build.name not in wrong:
                answer = build.ask(do="time", replays=options.replays)
                if "error" in answer:
                    wrong[build.name] = answer["error"]
                else:
                    times[build.name].append(answer["us"])
    medians = {build.name: statistics.median(times[build.name] or [float("nan")]) for build in builds}
    checks = {build.name: build.ask(do="check").get("check") for build in builds if build.name not in wrong}
    first = next(iter(checks.values()), None)
    return medians, [f"    {name}: {error}" for name, error in wrong.items()] + [
        f"    {name}: {check}, {builds[0].name}: {first}" for name, check in checks.items() if check != first
    ]


def line(case: str, medians: dict[str, float]) -> str:
    """A case's medians beside each other, each with its difference from the first."""
    first = next(iter(medians.values()))
    return f"{case:30s}" + "".join(f"{us:9.2f} {us - first:+8.2f}" for us in medians.values())


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", metavar="CASES.py")
    parser.add_argument("builds", nargs="+", metavar="NAME=PYTHONPATH[,VARIABLE=VALUE]")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--replays", type=int, default=10, help="passes a round")
    parser.add_argument("--hot", action="store_true", help="the first buffer set alone")
    parser.add_argument("--seconds", type=float, default=600, help="begin no case after so long")
    options = parser.parse_args()
    begin = time.monotonic()
    builds = [Build(text, options.cases) for text in options.builds]
    names = [build.read()["cases"] for build in builds][0]
    print(" " * 30 + "".join(f"{build.name:>18s}" for build in builds), flush=True)
    for case in [name for name in names if options.only in name]:
        if time.monotonic() - begin > options.seconds:
            print(f"no time left for {case}")
            break
        medians, wrong = measure_case(case, builds, options)
        print(line(case, medians), *wrong, sep="\n", flush=True)
    for build in builds:
        build.end()


if __name__ == "__main__":
    main()
