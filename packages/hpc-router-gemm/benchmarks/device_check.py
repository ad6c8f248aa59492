"""Checks the router's kernels on a Hopper GPU against float64, then times candidates of its Config for every case.

    python device_check.py RESULTS.json [--goals GOALS.json] [--only check,time] [--candidates 14] [--cases 192x4096]

RESULTS.json gets every check and every time. GOALS.json: {"rows": [{"op": "router-2", "case", "goal_us"}, ...]}, shown
beside the times. Exit status 1 where a check failed. It calls the extension directly, below the support table, so that
kernels can be checked before the table says that they run.
"""

import argparse
import itertools
import json
import math
import pathlib
import sys
import time
import traceback

import torch
from hpc_common.timing import Candidate, measure
from hpc_router_gemm import _C, RouterWeight, _cuda
from hpc_router_gemm.tune import candidate_configs

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))
import router_kernel_checks as checks  # noqa: E402

failures: list[str] = []
report: dict = {"checks": [], "times": []}


def run_checks() -> None:
    parts = (checks.every_kernel, checks.values, checks.planted_faults, checks.promises)
    for part in (*parts, checks.equal_rows_at_every_m, checks.route):
        start, before = time.time(), len(report["checks"])
        for name, ok, facts in part():
            report["checks"].append({"name": name, "ok": ok, **facts})
            if not ok:
                failures.append(f"{name} {facts}")
                if len(failures) <= 25:
                    print("FAILED", name, facts, flush=True)
        torch.cuda.synchronize()
        done = len(report["checks"]) - before
        print(f"{part.__name__}: {done} checks, {time.time() - start:.1f} s, {len(failures)} failed so far", flush=True)


def short(config) -> str:
    groups = f"g{config.k_groups}" if config.kernel == "tile" else ""
    return f"{config.kernel[0]}{config.rows}x{config.tokens}{groups} S{config.split} st{config.stages} c{config.ctas}"


def calls_of(buffers, terms, config):
    return [
        lambda x=x, w=w, y=y: _cuda.router_gemm(x, w.weight, w.split, terms, False, False, y, config)
        for x, w, y in buffers
    ]


def time_cases(goals: dict, count: int, only: str, terms_list: tuple[int, ...]) -> None:
    for (n, k), ms in checks.CASES.items():
        for m, terms in itertools.product(ms, terms_list):
            case = f"{n}x{k} m={m}"
            if only and only not in case:
                continue
            size = n * k * 4 + m * k * 2 + m * n * 4
            sets = min(48, max(2, math.ceil(201e6 / size) + 1))
            xs = [checks.make_x(m, k) for _ in range(sets)]
            weights = [RouterWeight(torch.randn(n, k, device=checks.DEVICE), terms) for _ in range(sets)]
            outs = [torch.empty(m, n, device=checks.DEVICE) for _ in range(sets)]
            configs = candidate_configs(m, n, k, terms, count, presplit=terms > 1)

            buffers = list(zip(xs, weights, outs, strict=True))
            candidates = [
                Candidate("router", case, short(config), calls_of(buffers, terms, config)) for config in configs
            ]
            times = [row.us for row in measure(candidates, device=checks.DEVICE)]
            rows = sorted(zip(times, configs, strict=True), key=lambda item: item[0])
            for us, config in rows:
                report["times"].append(
                    {
                        "case": case,
                        "terms": terms,
                        "us": us,
                        "config": repr(config),
                        "estimate": _C.estimate_us(config, m=m, n=n, k=k, terms=terms),
                        "chosen": repr(config) == repr(configs[0]),
                    }
                )
            goal = goals.get(case)
            best = "; ".join(f"{us:.2f} {short(config)}" for us, config in rows[:4])
            met = "" if goal is None else "ok " if rows[0][0] <= goal else "-- "
            print(
                f"{case:18s} t{terms} goal {goal or 0:6.1f} {met}chosen {times[0]:7.2f} {short(configs[0])} | {best}",
                flush=True,
            )
            del candidates, buffers, xs, weights, outs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results")
    parser.add_argument("--goals", default="")
    parser.add_argument("--only", default="check,time")
    parser.add_argument("--candidates", type=int, default=14)
    parser.add_argument("--cases", default="", help="time cases whose name contains this")
    parser.add_argument("--terms", default="2")
    args = parser.parse_args()
    goals = {}
    if args.goals:
        rows = json.loads(pathlib.Path(args.goals).read_text())["rows"]
        goals = {row["case"]: row["goal_us"] for row in rows if row["op"] == "router-2"}
    report["device"] = torch.cuda.get_device_name(checks.DEVICE)
    report["build"] = _C.build_info()
    print(report["device"], report["build"], "torch", torch.__version__, flush=True)
    try:
        if "check" in args.only:
            run_checks()
        if "time" in args.only:
            time_cases(goals, args.candidates, args.cases, tuple(int(t) for t in args.terms.split(",")))
    except Exception:
        failures.append(traceback.format_exc())
        print(failures[-1])
    report["failures"] = failures
    pathlib.Path(args.results).write_text(json.dumps(report, indent=1))
    print(f"{len(report['checks'])} checks, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
