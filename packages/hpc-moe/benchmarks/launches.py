"""Kernels a call of ``fused_moe``, and its time with programmatic dependent launch and without (HPC_PDL=0).

    python packages/hpc-moe/benchmarks/launches.py [--json results.json] [--case tp8]

HPC_PDL is read once a process, so two processes are timed by turns (common/benchmarks/by_turns.py); their outputs must
be alike. Kernels are the nodes of a captured call: with e4m3 activations, and with bf16 ones, which it quantises.
"""

import argparse
import ctypes
import os
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hpc_moe
import moe as bench
import torch
from hpc_common.timing import Row, results, write_results

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "common" / "benchmarks"))
import by_turns  # noqa: E402

OPS = {"moe-tensor": "tensor", "moe-block": "block"}
PROVIDERS = {"ours": "1", "ours without PDL": "0"}
KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


@dataclass(frozen=True)
class Counted(Row):
    """A row with the number of kernels of one call, and with bf16 activations."""

    kernels: int
    kernels_bf16_x: int


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def cases() -> dict[str, Callable[[], tuple[list, Callable[[], str]]]]:
    """by_turns.py's: every row of the tables."""
    kept: dict[tuple[str, str], bench.Weights] = {}  # those of the latest shape and quantisation

    def make(shape: bench.Shape, tokens: int, quant: str) -> tuple[list, Callable[[], str]]:
        if (shape.name, quant) not in kept:
            kept.clear()
            kept[shape.name, quant] = bench.make_weights(shape, quant, device())
        calls = bench.calls(shape, tokens, quant, kept[shape.name, quant], device())
        return calls, lambda: str(calls[0]().view(torch.int16).sum(dtype=torch.int64).item())

    return {
        f"{op} {shape.name} m={tokens}": lambda shape=shape, tokens=tokens, quant=quant: make(shape, tokens, quant)
        for op, quant in OPS.items()
        for shape in bench.SHAPES
        for tokens in shape.tokens
    }


def kernels(call: Callable[[], Any]) -> int:
    """Kernels that a call launches. RuntimeError where it puts anything else on the GPU."""
    call()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    driver, handle, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    failed = driver.cuGraphGetNodes(handle, None, ctypes.byref(count))
    nodes, kind = (ctypes.c_void_p * count.value)(), ctypes.c_int()
    failed = failed or driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count))
    for node in nodes:
        failed = failed or driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        if failed or kind.value != KERNEL_NODE:
            raise RuntimeError(f"a node of type {kind.value}, error {failed}")
    return count.value


def counts(names: list[str]) -> dict[str, tuple[int, int]]:
    """Kernels of each case, with e4m3 activations and with bf16 ones."""
    found = {}
    for op, quant in OPS.items():
        for shape in bench.SHAPES:
            mine = {tokens: f"{op} {shape.name} m={tokens}" for tokens in shape.tokens}
            mine = {tokens: name for tokens, name in mine.items() if name in names}
            weights = bench.make_weights(shape, quant, device()) if mine else None
            for tokens, name in mine.items():
                made = (bench.calls(shape, tokens, quant, weights, device(), x) for x in (None, torch.bfloat16))
                found[name] = tuple(kernels(calls[0]) for calls in made)
    return found


def run(match: str = "", rounds: int = 3, replays: int = 10, script: str = __file__) -> list[Row]:
    """Rows of the cases that contain ``match``, printed as they come. RuntimeError where outputs differ.

    ``script``: whose ``cases`` the two processes take.
    """
    names = [name for name in cases() if match in name]
    options = argparse.Namespace(rounds=rounds, replays=replays, hot=False)
    path = os.pathsep.join(sys.path)
    builds = [by_turns.Build(f"{provider}={path},HPC_PDL={pdl}", script) for provider, pdl in PROVIDERS.items()]
    rows: list[Row] = []
    try:
        found = counts(names)  # while they start
        for build in builds:
            build.read()
        for name in names:
            medians, wrong = by_turns.measure_case(name, builds, options)
            if wrong:
                raise RuntimeError(f"{name}: {wrong}")
            op, case = name.split(" ", 1)
            rows += [Counted(op, case, provider, "cold", us, *found[name]) for provider, us in medians.items()]
            print(f"{by_turns.line(name, medians)}  {found[name][0]} kernels, bf16 x {found[name][1]}", flush=True)
    finally:
        for build in builds:
            build.end()
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write results here")
    parser.add_argument("--case", default="", help="only cases that contain this, such as moe-block hy3-tp8")
    args = parser.parse_args()
    rows = run(args.case)
    if args.json:
        write_results(args.json, results(rows, {"hpc_moe": hpc_moe._C.build_info()}))


if __name__ == "__main__":
    main()
