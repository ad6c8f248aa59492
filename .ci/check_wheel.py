#!/usr/bin/env python3
"""Prints wheel sizes and holds them against budgets; usage: check_wheel.py WHEEL ...

A wheel of this project carries no libtorch, no compiler and no test; its size is its kernels'.
"""

import sys
import zipfile
from pathlib import Path

BUDGET_MB = {
    "hpc_common": 2,
    "hpc_attention": 12,
    "hpc_router_gemm": 8,
    "hpc_moe": 12,
    "hpc_sglang": 1,
    "hpc_tools": 1,
}
FORBIDDEN = ("tests/", "benchmarks/", "libtorch", "libcudart.so", ".cubin")

failed = False
for path in map(Path, sys.argv[1:]):
    name = path.name.split("-")[0]
    size = path.stat().st_size / 2**20
    found = [entry for entry in zipfile.ZipFile(path).namelist() if any(part in entry for part in FORBIDDEN)]
    problem = "" if size <= BUDGET_MB[name] else f"  OVER its budget of {BUDGET_MB[name]} MB"
    problem += f"  HOLDS {found}" if found else ""
    failed |= bool(problem)
    print(f"{path.name}: {size:.2f} MB{problem}")
sys.exit(failed)
