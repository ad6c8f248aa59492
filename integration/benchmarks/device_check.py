"""Whether the plugin says on a GPU what SGLang's other backends say, with CUDA graphs.

    python3 device_check.py                      # triton, fa3, hpc; table last, exit status 1 where a bound is passed
    python3 device_check.py --case bf16 --backend triton --backend flashinfer --backend hpc

Cases, one model each way (``forced``): "bf16" and "fp8_e4m3", KV caches of a bf16 model; "experts", the same model in
block FP8, where ours also runs experts and gates. The bound: this package's mean difference from each of the two other
backends is at most 1.5 times the difference between those two. For "experts" the two others run the same experts and
gates, so the difference between them is not one of these, and the table has no bound.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

from forced import LENGTHS, Lane, difference, make_checkpoint, quantise_checkpoint

BOUND = 1.5
CASES = ("bf16", "fp8_e4m3", "experts")


def lane(case: str, backend: str, folder: str, more: dict[str, object]) -> Lane:
    arguments = {"attention_backend": backend, "page_size": 64, "kv_cache_dtype": "auto"}
    if case == "fp8_e4m3":
        arguments["kv_cache_dtype"] = case
    if case == "experts" and backend == "hpc":
        arguments["moe_runner_backend"] = "hpc_ops"
    model = pathlib.Path(folder, "fp8" if case == "experts" else "bf16")
    return Lane(backend, str(model), {**arguments, **more}, gates=case == "experts" and backend == "hpc")


def compare(case: str, lanes: list[Lane]) -> tuple[list[str], bool]:
    """Lines of the table for one case, and whether the bound holds."""
    others = [lane for lane in lanes if lane.name != "hpc"]
    between = difference(others[0], others[-1])
    lines, good = [], True
    if len(others) > 1:
        lines.append(f"{case:10s} {others[0].name:>10s} - {others[-1].name:10s} {between:9.5f}")
    for ours in (lane for lane in lanes if lane.name == "hpc"):
        for other in others:
            apart = difference(ours, other)
            line = f"{case:10s} {'hpc':>10s} - {other.name:10s} {apart:9.5f}"
            if len(others) > 1 and case != "experts":  # else there is nothing to hold it against
                held = apart <= BOUND * between
                good &= held
                line += f"  {apart / between:5.2f} of {BOUND}  {'held' if held else 'PASSED THE BOUND'}"
            lines.append(line)
        for call in ("attention.decode", *(["moe.block", "router.route"] if case == "experts" else [])):
            if not ours.calls.get(call):
                good = False
                lines.append(f"{case:10s} {call} was not called: {ours.calls}")
    return lines, good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="two others and hpc; default triton, fa3, hpc")
    parser.add_argument("--case", action="append", choices=CASES, help="default all")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=JSON", help="more engine arguments")
    parser.add_argument("--settings", default="{}", help="JSON, changes to the model's configuration")
    parser.add_argument("--longest", type=int, default=1 << 20, help="leave out longer prompts")
    parser.add_argument("--logs", help="keep what the engines say in this folder")
    parser.add_argument("--port", type=int, default=28761, help="first of the engines' own")
    options = parser.parse_args()
    more = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in options.engine)}
    lengths = [length for length in LENGTHS if length <= options.longest]
    begin = time.perf_counter()
    table, good = [], True
    with tempfile.TemporaryDirectory() as folder:
        cases = options.case or list(CASES)
        backends = options.backend or ["triton", "fa3", "hpc"]
        lanes = {case: [lane(case, backend, folder, more) for backend in backends] for case in cases}
        started = [(case, one) for case in cases for one in lanes[case]]
        logs = options.logs or folder
        for number, (case, one) in enumerate(started):
            one.start(f"{logs}/{case}-{one.name}.json", lengths, options.port + 10 * number)
        make_checkpoint(f"{folder}/bf16", json.loads(options.settings))
        if "experts" in cases:
            quantise_checkpoint(f"{folder}/bf16", f"{folder}/fp8")
        print(f"checkpoints: {time.perf_counter() - begin:.0f} s", flush=True)
        for case, one in started:
            if not one.finish():
                good = False
                print(f"{one.name} {case}: failed\n{one.log[-3000:]}", flush=True)
            for line in one.log.splitlines():
                if "hpc-sglang: " in line and " used" in line and "not used" not in line:
                    print(line, flush=True)
            print(f"{case} {one.name}: {time.perf_counter() - begin:.0f} s", flush=True)
            if one is lanes[case][-1] and all(lane.at for lane in lanes[case]):
                lines, held = compare(case, lanes[case])
                print("\n".join(lines), flush=True)
                table, good = table + lines, good and held
    print("\ncase            pair                 mean |difference| of logprobs, times the others'")
    print("\n".join(table), flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
