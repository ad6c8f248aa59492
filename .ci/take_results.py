#!/usr/bin/env python3
"""Results files, tables and plots from the JSON files of one `.ci/gpu_results.sh OUT`.

    uv run .ci/take_results.py OUT

Writes each package's results/*.json (files of one package are joined; they must be of one device, day and build) and
runs the packages' figures.py. Parts that OUT lacks are left as they are.
"""

import json
import pathlib
import subprocess
import sys
from typing import Any

from hpc_common.timing import write_results

ROOT = pathlib.Path(__file__).resolve().parent.parent
# results file: the JSON files that it is joined from
FILES = {
    "packages/hpc-attention/benchmarks/results/h200.json": ("decode", "sweeps", "plan"),
    "packages/hpc-router-gemm/benchmarks/results/h200.json": ("router",),
    "packages/hpc-router-gemm/benchmarks/results/h200_decode.json": ("router_decode",),
    "packages/hpc-router-gemm/benchmarks/results/h200_route.json": ("router_route",),
    "packages/hpc-moe/benchmarks/results/h200.json": ("moe",),
    "packages/hpc-moe/benchmarks/results/h200_bf16_x.json": ("moe_bf16_x",),
    "packages/hpc-moe/benchmarks/results/h200_bf16_weights.json": ("moe_bf16_weights",),
    "packages/hpc-moe/benchmarks/results/h200_launches.json": ("moe_launches",),
    "packages/hpc-moe/benchmarks/results/h200_skew.json": ("moe_skew",),
    "integration/benchmarks/results/h200.json": ("serving",),
}


def join(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One document: the rows in order, the commands by semicolons. Raises ValueError where another head differs."""
    first = documents[0]
    for document in documents[1:]:
        for key in first.keys() | document.keys():
            if key not in ("command", "rows") and document.get(key) != first.get(key):
                raise ValueError(f"{key}: {first.get(key)} and {document.get(key)} in files to be joined")
    command = "; ".join(document["command"] for document in documents)
    return {**first, "command": command, "rows": [row for document in documents for row in document["rows"]]}


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    taken = set()
    for target, names in FILES.items():
        sources = [folder / f"{name}.json" for name in names]
        missing = [source.name for source in sources if not source.exists()]
        if missing:
            print(f"{target} stays as it is: no {', '.join(missing)}")
            continue
        write_results(ROOT / target, join([json.loads(source.read_text()) for source in sources]))
        print(f"{target} written")
        taken.add(ROOT / target.split("/results/")[0] / "figures.py")
    for figures in sorted(taken):
        subprocess.run([sys.executable, str(figures)], check=True)


if __name__ == "__main__":
    main()
