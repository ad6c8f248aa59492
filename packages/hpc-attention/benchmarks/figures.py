"""The README's tables of measured times, and plots of the sweeps, made from results/h200.json.

    uv run python packages/hpc-attention/benchmarks/figures.py [--check]

Writes the tables between their markers in ../README.md, and results/scaling.svg where the results have sweeps
(`decode.py --sweeps`). --check writes nothing and exits with 1 where one of them is out of date.
"""

import math
import pathlib
import sys
from collections.abc import Mapping, Sequence

from hpc_common.generated import RESULTS_BEGIN, RESULTS_END, between, command
from hpc_common.lengths import parse_lengths
from hpc_common.timing import floor_us

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "h200.json"
README = HERE.parent / "README.md"

# op, heading, bytes of keys and values a token
TABLES = (
    ("decode-e4m3-8/1", "e4m3 cache, 8 query heads over 1 KV head", 2 * 128),
    ("decode-bf16-8/1", "bf16 cache, 8 query heads over 1 KV head", 2 * 128 * 2),
    ("decode-e4m3-64/8", "e4m3 cache, 64 query heads over 8 KV heads", 2 * 128 * 8),
)
# op without the cache's dtype, title, what the row's name counts
PLOTS = (
    ("tokens", "32 requests of equal length", "tokens of all requests"),
    ("batch", "256K tokens in equal requests", "requests"),
    ("q_len", "64 requests of 4K tokens", "q_len"),
    ("ratio", "64 requests of 4K tokens", "query heads a KV head"),
)
SERIES = (("e4m3", "#1f6fb4"), ("bf16", "#c0392b"))
WIDTH, HEIGHT, LEFT, TOP, GAP = 230, 220, 52, 62, 34
Times = dict[str, dict[str, dict[str, float]]]  # by op, row, provider


def times_of(document: Mapping) -> Times:
    """Cold microseconds by op, row and provider."""
    times: Times = {}
    for row in document["rows"]:
        if row["mode"] == "cold":
            times.setdefault(row["op"], {}).setdefault(row["case"], {})[row["provider"]] = row["us"]
    return times


def decode_table(heading: str, token_bytes: int, rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Markdown lines: floor, ours, ours with its share of the plan, bandwidth, and the peers that were there.

    A time that the results lack is an empty cell.
    """
    peers = sorted({name for row in rows.values() for name in row if not name.startswith("ours")})
    lines = [
        f"{heading}:",
        "",
        "| requests | floor | decode | plan + 48 layers, a layer | TB/s | " + "".join(f"{name} | " for name in peers),
        "|---" + "|--:" * (4 + len(peers)) + "|",
    ]
    for case, row in rows.items():
        size = token_bytes * sum(parse_lengths(case))
        us = [f"{row[name]:.1f}" if name in row else "" for name in ("ours", "ours, plan/48", *peers)]
        bandwidth = f"{size / row['ours, plan/48'] / 1e6:.2f}" if "ours, plan/48" in row else ""
        cells = [f"{floor_us(size):.1f}", *us[:2], bandwidth, *us[2:]]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return [line.rstrip() for line in lines] + [""]


def tables(document: Mapping) -> str:
    """Markdown: every table that the results have rows for."""
    times = times_of(document)
    lines = [
        f"Microseconds a call on one {document['device']}, {document['date']}: CUDA graph replay, cold (the layers' "
        "caches exceed L2), head_dim 128, page size 64, bf16 query. `2x32K+30x4K` is 2 requests of 32,768 tokens and "
        "30 of 4,096. The floor is a plain streaming kernel's time for the same bytes. `decode` alone has as many "
        "layers in a graph as its bytes need to be cold (3 to 24), so a part of the graph's own start.",
        "",
    ]
    for op, heading, token_bytes in TABLES:
        if op in times:
            lines += decode_table(heading, token_bytes, times[op])
    if "plan" in times:
        lines += ["`plan.update`:", "", "| requests | alone in a graph | 20 in a graph, each |", "|---|--:|--:|"]
        lines += [
            f"| {case} | {row['ours']:.1f} | {row['ours, 20 a graph']:.1f} |" for case, row in times["plan"].items()
        ]
        lines.append("")
    for op in sorted(set(times) - {op for op, *_ in TABLES} - {"plan"}):
        if any(op == f"{prefix}-{kind}" for prefix, *_ in PLOTS for kind, _ in SERIES):
            continue  # in the plots
        cells = ", ".join(f"{case} {row['ours']:.1f}" for case, row in times[op].items())
        lines += [f"`{op}`: {cells}", ""]
    return "\n".join(lines).rstrip()


def number(name: str) -> float:
    """A row's name as a number: `8K` is 8,192."""
    return float(name[:-1]) * 1024 if name.endswith("K") else float(name)


def plot(times: Times, title: str) -> str:
    """An SVG with a panel for each sweep: both axes logarithmic."""
    shown = [p for p in PLOTS if any(f"{p[0]}-{kind}" in times for kind, _ in SERIES)]
    width, height = LEFT + len(shown) * (WIDTH + GAP + LEFT), TOP + HEIGHT + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">{title}</text>',
    ]
    for index, (kind, colour) in enumerate(SERIES):
        x = LEFT + 90 * index
        parts.append(
            f'<line x1="{x}" y1="32" x2="{x + 22}" y2="32" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{x + 27}" y="36">{kind}</text>'
        )
    for index, (prefix, heading, unit) in enumerate(shown):
        series = {
            kind: {number(name): row["ours"] for name, row in times.get(f"{prefix}-{kind}", {}).items()}
            for kind, _ in SERIES
        }
        points = [point for found in series.values() for point in found.items()]
        first, last = min(x for x, _ in points), max(x for x, _ in points)
        low, high = min(y for _, y in points) / 1.2, max(y for _, y in points) * 1.2
        left = LEFT + index * (WIDTH + GAP + LEFT)

        def x_of(x: float, left: float = left, first: float = first, last: float = last) -> float:
            return left + WIDTH * (math.log(x / first) / math.log(last / first) if last > first else 0.5)

        def y_of(y: float, low: float = low, high: float = high) -> float:
            return TOP + HEIGHT * (1 - math.log(y / low) / math.log(high / low))

        parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP - 6}" text-anchor="middle">{heading}</text>')
        ticks = [s * 10.0**e for e in range(-1, 5) for s in (1, 2, 5) if low <= s * 10.0**e <= high]
        for tick in ticks:
            y = y_of(tick)
            parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" stroke="#e3e3e3"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for x in sorted({x for x, _ in points}):
            label = f"{x / 1024:g}K" if x >= 1024 else f"{x:g}"
            parts.append(
                f'<text x="{x_of(x):.1f}" y="{TOP + HEIGHT + 14}" text-anchor="middle" font-size="9">{label}</text>'
            )
        parts.append(f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>')
        for kind, colour in SERIES:
            line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in series[kind].items())
            if line:
                parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left}" y="{TOP + HEIGHT + 34}">{unit}; microseconds a call, cold</text>')
    return "\n".join([*parts, "</svg>", ""])


def outputs(document: Mapping, readme: str) -> dict[pathlib.Path, str]:
    """What every file should hold. ValueError where the README has not both markers once."""
    times = times_of(document)
    text = tables(document)
    found = {}
    if any(f"{prefix}-{kind}" in times for prefix, *_ in PLOTS for kind, _ in SERIES):
        found[RESULTS.with_name("scaling.svg")] = plot(times, f"decode, {document['device']}, {document['date']}")
        text += "\n\n![Time against tokens, batch, q_len and ratio of heads](benchmarks/results/scaling.svg)"
    found[README] = between(readme, RESULTS_BEGIN, RESULTS_END, text)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    return command(outputs, RESULTS, README, __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    sys.exit(main())
