"""Whether tensor and expert parallel engines on two GPUs say what one GPU says.

    python3 rank_check.py

One model in block FP8 (``forced``), attention, experts and gates by this package or by SGLang with triton, on one GPU,
with tensor parallelism 2 and with expert parallelism 2. The bound: between one GPU and two, this package's logprobs
differ on average by at most 1.5 times as much as triton's do. Reductions between the GPUs are NCCL's.
"""

import argparse
import json
import sys
import tempfile
import time

from forced import LENGTHS, Lane, difference, make_checkpoint, quantise_checkpoint

BOUND = 1.5
BACKENDS = {
    "triton": dict(attention_backend="triton", moe_runner_backend="triton"),
    "hpc": dict(
        prefill_attention_backend="triton", decode_attention_backend="hpc", moe_runner_backend="hpc_ops", page_size=64
    ),
}
# All-reduce kernels other than NCCL's are off: some of them need NVLink multicast, which not every machine has.
TWO = dict(tp_size=2, disable_custom_all_reduce=True, enforce_disable_flashinfer_allreduce_fusion=True)
RANKS = {"one": {}, "tp2": TWO, "ep2": {**TWO, "ep_size": 2}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=JSON", help="more engine arguments")
    parser.add_argument("--port", type=int, default=29761, help="first of the engines' own")
    options = parser.parse_args()
    more = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in options.engine)}
    begin = time.perf_counter()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        lanes = {
            (ranks, name): Lane(name, f"{folder}/fp8", {**arguments, **parallel, **more}, gates=name == "hpc")
            for ranks, parallel in RANKS.items()
            for name, arguments in BACKENDS.items()
        }
        for number, ((ranks, name), lane) in enumerate(lanes.items()):
            lane.start(f"{folder}/{ranks}-{name}.json", list(LENGTHS), options.port + 20 * number)
        make_checkpoint(f"{folder}/bf16", {})
        quantise_checkpoint(f"{folder}/bf16", f"{folder}/fp8")
        for (ranks, name), lane in lanes.items():
            if not lane.finish():
                good = False
                print(f"{name} {ranks}: failed\n{lane.log[-3000:]}", flush=True)
            print(f"{name} {ranks}: {time.perf_counter() - begin:.0f} s, {lane.calls}", flush=True)
        print("ranks   mean |difference| of logprobs from one GPU: triton, hpc, hpc's times triton's", flush=True)
        for ranks in ("tp2", "ep2"):
            if not all(lanes[where, name].at for where in ("one", ranks) for name in BACKENDS):
                continue
            theirs, ours = (difference(lanes["one", name], lanes[ranks, name]) for name in BACKENDS)
            held = ours <= BOUND * theirs
            called = all(
                lanes[ranks, "hpc"].calls.get(call) for call in ("attention.decode", "moe.block", "router.route")
            )
            good &= held and called
            verdict = "held" if held else "PASSED THE BOUND"
            print(f"{ranks:7s} {theirs:9.5f} {ours:9.5f}  {ours / theirs:5.2f} of {BOUND}  {verdict}", flush=True)
            if not called:
                print(f"{ranks:7s} this package's operators were not called: {lanes[ranks, 'hpc'].calls}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
