"""Time of plan.update, the table's `plan` rows: 8 query heads over 1 KV head, head_dim 128, page 64, e4m3 cache.

`uv run python packages/hpc-attention/benchmarks/plan.py [--json FILE]`. Provider "ours" has one update in a CUDA graph,
as the table's peers had; "ours, 20 a graph" has twenty, which leaves out most of what a replay costs.
"""

import argparse
import pathlib

import torch
from hpc_attention import _C, DecodePlan
from hpc_common.lengths import parse_lengths
from hpc_common.timing import Candidate, measure, results, write_results

CASES = (
    "64x0.5K", "64x4K", "32x0.125K+32x4K", "2x32K+30x4K", "1x64K+15x4K", "1x128K+31x4K", "1x4K", "1x32K", "8x8K",
    "256x1K",
)  # fmt: skip
MORE = ("1024x1K", "4096x1K")  # not in the table: the largest batches


def candidates(case: str, device: torch.device) -> list[Candidate]:
    """One update a graph and twenty, for a batch in the tables' notation; on a CPU the host planner's time."""
    lengths = parse_lengths(case)
    plan = DecodePlan(len(lengths), 8, 1, 128, 64, kv_dtype=torch.float8_e4m3fn, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)

    def update() -> None:
        plan.update(seq_lens)

    return [
        Candidate("plan", case, "ours", [update]),
        Candidate("plan", case, "ours, 20 a graph", [update] * 20),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = []
    for case in (*CASES, *MORE):
        rows += measure(candidates(case, device), device=device)
        print(f"{case:18s}" + "".join(f"  {row.provider}: {row.us:7.2f} us" for row in rows[-2:]), flush=True)
    if arguments.json:
        write_results(arguments.json, results(rows, {"hpc_attention": _C.build_info()}, device))


if __name__ == "__main__":
    main()
