"""Time of decode: the tables' rows, planned steps, and sweeps over length, batch, query rows, heads, pages, head_dim.

`uv run python packages/hpc-attention/benchmarks/decode.py [--only TEXT] [--sweeps] [--json FILE]`

Each buffer set is one layer's cache; a pass calls every set once, so a cold time reads the cache from memory. All sets
share one random page table and one plan. Provider "ours" is decode alone; "ours, plan/48" is one plan.update and 48
decodes, divided by 48; FlashInfer is measured in the same run where it is installed (--no-peers leaves it out).
"""

import argparse
import pathlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from decode_peers import PEERS, agreeing
from hpc_attention import _C, DecodePlan, decode
from hpc_common.lengths import format_lengths, parse_lengths
from hpc_common.timing import Candidate, Row, buffer_sets, floor_us, measure, results, write_results

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHORT = {FP8: "e4m3", BF16: "bf16"}
LAYERS = 48
CASES = (
    "64x0.5K", "64x4K", "32x0.125K+32x4K", "2x32K+30x4K", "1x64K+15x4K", "1x128K+31x4K", "1x4K", "1x32K", "8x8K",
    "256x1K",
)  # fmt: skip
MORE_HEADS = ("64x4K", "1x64K+15x4K", "1x4K", "8x8K")
# 64 MB of e4m3 keys and values each: skew should cost nothing.
SKEW = ("256x1K", "64x4K", "1x128K+31x4K", "2x64K+32x4K", "1x252K+1x4K")


@dataclass(frozen=True)
class Case:
    """One row. lengths in the tables' notation; num_ctas: None for the plan's default; name: the row's, if not that."""

    op: str
    lengths: str
    kv_dtype: torch.dtype = FP8
    num_q_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 128
    page_size: int = 64
    q_len: int = 1
    num_ctas: int | None = None
    name: str = ""

    @property
    def row(self) -> str:
        """The row's name in results."""
        return self.name or self.lengths

    @property
    def tokens(self) -> int:
        return sum(parse_lengths(self.lengths))

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call must read."""
        return 2 * self.tokens * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize

    def floor_us(self) -> float:
        """Reading the cache once, or the products of both matrices at 790 TFLOP/s, whichever takes longer."""
        rows = self.q_len * self.num_q_heads // self.num_kv_heads
        return floor_us(self.kv_bytes, 4 * self.tokens * self.num_kv_heads * rows * self.head_dim)


def tables() -> list[Case]:
    """The 24 rows of the decode tables."""
    rows = [Case("decode-e4m3-8/1", lengths) for lengths in CASES]
    rows += [Case("decode-bf16-8/1", lengths, BF16) for lengths in CASES]
    return rows + [Case("decode-e4m3-64/8", lengths, FP8, 64, 8) for lengths in MORE_HEADS]


def mixes() -> list[Case]:
    """Batches drawn from the request lengths of two services, as `hpc demo` draws them; none without hpc-tools."""
    try:
        from hpc_tools.requests import SERVICES, draw
    except ImportError:
        print("hpc-tools is not installed: the services' mixes are left out", flush=True)
        return []
    return [
        Case(
            f"mix-{SHORT[kv_dtype]}", format_lengths(draw(service, count, seed=0)), kv_dtype, name=f"{service} x{count}"
        )
        for kv_dtype in (FP8, BF16)
        for service in SERVICES
        for count in (32, 256)
    ]


def sweeps() -> list[Case]:
    """One property varied at a time: op is the property and the cache's dtype, the row its value."""
    one = Case("", "64x4K")
    rows = [replace(one, op="skew-e4m3", lengths=lengths) for lengths in SKEW]
    for kv_dtype in (FP8, BF16):
        base, kind = replace(one, kv_dtype=kv_dtype), SHORT[kv_dtype]
        for tokens in (0.25, 0.5, 1, 2, 4, 8, 16, 32):
            rows.append(replace(base, op=f"tokens-{kind}", lengths=f"32x{tokens}K", name=f"{32 * tokens:g}K"))
        for requests, tokens in ((1, 256), (4, 64), (16, 16), (64, 4), (256, 1), (1024, 0.25), (4096, 0.0625)):
            rows.append(replace(base, op=f"batch-{kind}", lengths=f"{requests}x{tokens}K", name=f"{requests}"))
        rows += [replace(base, op=f"q_len-{kind}", q_len=n, name=f"{n}") for n in (1, 2, 4, 8)]
        rows += [replace(base, op=f"ratio-{kind}", num_q_heads=n, name=f"{n}") for n in (1, 2, 4, 8, 12, 16)]
        rows += [replace(base, op=f"page_size-{kind}", page_size=n, name=f"{n}") for n in (1, 16, 64, 256)]
        rows += [replace(base, op=f"head_dim-{kind}", head_dim=n, name=f"{n}") for n in (64, 128, 256)]
        rows.append(replace(base, op=f"heads-{kind}", num_q_heads=32, num_kv_heads=4, name="32/4"))
    return rows + mixes()


class Layers:
    """The caches, queries and outputs of as many layers as a cold measurement rotates over, with one plan."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case = case
        lengths = parse_lengths(case.lengths)
        generator = torch.Generator(device=device).manual_seed(seed)
        used = [-(-length // case.page_size) for length in lengths]
        order = torch.randperm(sum(used), generator=generator, device=device).to(torch.int32)
        self.page_table = torch.zeros(len(lengths), max(used), dtype=torch.int32, device=device)
        begin = 0
        for request, pages in enumerate(used):
            self.page_table[request, :pages] = order[begin : begin + pages]
            begin += pages
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        shape = (sum(used), case.page_size, case.num_kv_heads, case.head_dim)
        rows = (len(lengths) * case.q_len, case.num_q_heads, case.head_dim)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=BF16)

        self.sets = [
            (normal(*rows), normal(*shape).to(case.kv_dtype), normal(*shape).to(case.kv_dtype), torch.empty(
                rows, dtype=BF16, device=device
            ))
            for _ in range(buffer_sets(case.kv_bytes))
        ]  # fmt: skip
        self.plan = self.make_plan()

    def make_plan(self, num_ctas: int | None = None, min_tiles: int | None = None) -> DecodePlan:
        """An updated plan, for requests as long as the page table holds.

        ``min_tiles`` overrides the plan's own lower end of a CTA's work.
        """
        case = self.case
        plan = DecodePlan(
            len(self.seq_lens), case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size, q_len=case.q_len,
            kv_dtype=case.kv_dtype, device=self.seq_lens.device, num_ctas=num_ctas or case.num_ctas,
            max_seq_len=self.page_table.shape[1] * case.page_size,
        )  # fmt: skip
        if min_tiles:
            plan.min_tiles = min_tiles
        plan.update(self.seq_lens)
        return plan

    def calls(self, plan: DecodePlan | None = None, run: Callable[..., Any] = decode) -> list[Callable[[], Any]]:
        """One call of decode for each layer. ``run``: called as decode is."""
        plan = plan or self.plan
        return [
            lambda q=q, k=k, v=v, out=out: run(q, k, v, self.page_table, plan, out=out) for q, k, v, out in self.sets
        ]

    def planned_calls(self) -> list[Callable[[], Any]]:
        """LAYERS calls, the first behind a plan.update."""
        calls = [self.calls()[layer % len(self.sets)] for layer in range(LAYERS)]
        first = calls[0]

        def updated() -> None:
            self.plan.update(self.seq_lens)
            first()

        return [updated, *calls[1:]]

    def candidates(self, peers: bool = True) -> list[Candidate]:
        """What the tables hold: decode alone, with its share of the planning, and the peers that can do the case."""
        op, name = self.case.op, self.case.row
        found = [
            Candidate(op, name, "ours", self.calls()),
            Candidate(op, name, "ours, plan/48", self.planned_calls()),
        ]
        if peers and self.case.q_len == 1 and self.seq_lens.is_cuda:
            for provider, make in PEERS.items():
                calls = make(self.sets, self.page_table, parse_lengths(self.case.lengths))
                calls = calls and agreeing(calls, self.calls(), self.sets[0][3], provider)
                found += [Candidate(op, name, provider, calls)] if calls else []
        return found


def run(cases: Iterable[Case], device: torch.device, mode: str = "cold", peers: bool = True) -> list[Row]:
    """Measure cases one after the other and print a line for each."""
    rows: list[Row] = []
    for case in cases:
        layers = Layers(case, device)
        found = measure(layers.candidates(peers), mode=mode, device=device)
        rows += found
        times = "".join(f"  {row.provider}: {row.us:7.2f}" for row in found)
        print(
            f"{case.op:22s} {case.row:18s} {str(case.kv_dtype)[6:]:14s} floor {case.floor_us():7.2f}{times} us",
            flush=True,
        )
        del layers
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose op and lengths contain this text")
    parser.add_argument("--sweeps", action="store_true", help="the sweeps in place of the tables")
    parser.add_argument("--no-peers", action="store_true", help="leave other implementations out")
    parser.add_argument("--hot", action="store_true", help="one cache again and again")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    cases = [c for c in (sweeps() if arguments.sweeps else tables()) if arguments.only in f"{c.op} {c.row}"]
    rows = run(cases, device, "hot" if arguments.hot else "cold", not arguments.no_peers)
    if arguments.json:
        write_results(arguments.json, results(rows, {"hpc_attention": _C.build_info()}, device))


if __name__ == "__main__":
    main()
