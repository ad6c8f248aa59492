"""The README's tables of measured times and errors, and two plots against M, made from results/h200.json; the table of
few tokens from results/h200_decode.json, that of the choice of experts from results/h200_route.json.

    uv run python packages/hpc-router-gemm/benchmarks/figures.py [--check]

Writes the table between its markers in ../README.md, and results/latency.svg and results/error.svg.
--check writes nothing and exits with 1 where one of them is out of date.
"""

import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpc_common.generated import RESULTS_BEGIN, RESULTS_END, between, command

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "h200.json"
DECODE = RESULTS.with_name("h200_decode.json")  # few tokens, more sizes
ROUTE = RESULTS.with_name("h200_route.json")  # the choice of experts
README = HERE.parent / "README.md"

# (op, provider), heading, colour, dashes
SERIES = (
    (("router-2", "ours"), "2 terms", "#1f6fb4", ""),
    (("router-3", "ours"), "3 terms", "#0b3d66", ""),
    (("router-2", "cuBLAS fp32"), "cuBLAS fp32", "#c0392b", "6 3"),
    (("router-2", "cuBLAS TF32"), "cuBLAS TF32", "#e08e0b", "6 3"),
    (("router-2", "cuBLAS bf16 (one product)"), "cuBLAS bf16, one product", "#7f8c8d", "2 3"),
)
# What a plain streaming kernel takes on an H200 to read so many bytes once, cold: megabytes, microseconds. Between
# them, and below the first, a line.
READ = ((1.05, 1.25), (2.1, 1.58), (3.15, 1.91), (4.72, 2.33), (8.4, 3.04), (16.8, 4.94), (33.6, 8.8), (67.1, 16.1))
TENSOR_FLOPS = 790e12  # of bf16 products, as large ones reach them on that card
# Times two terms that three may take: where three products take longer than the read of the fp32 weight, and elsewhere.
ALLOWED = (1.5, 1.15)
FEW = 64  # tokens: two terms may take OVER_CUBLAS times what cuBLAS fp32 takes
OVER_CUBLAS = 1.02
Key = tuple[str, str]
Values = dict[str, dict[int, dict[Key, float]]]  # by size, M, series

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 260, 52, 62, 24


def values_of(document: Mapping, mode: str, name: str) -> Values:
    """One number of each row of ``mode``, by size, M and series."""
    values: Values = {}
    for row in document["rows"]:
        if row["mode"] == mode:
            size, m = row["case"].split(" m=")
            values.setdefault(size, {}).setdefault(int(m), {})[row["op"], row["provider"]] = row[name]
    return values


def read_us(n: int, k: int) -> float:
    """Microseconds to read an fp32 weight of n x k once."""
    size = 4e-6 * n * k
    right = next((i for i in range(1, len(READ)) if READ[i][0] >= size), len(READ) - 1)
    (x0, y0), (x1, y1) = READ[right - 1 : right + 1]
    return y0 + (size - x0) * (y1 - y0) / (x1 - x0)


def products_us(m: int, n: int, k: int, terms: int = 3) -> float:
    """Microseconds that the products of so many terms take by arithmetic alone."""
    return terms * 2e6 * m * n * k / TENSOR_FLOPS


def allowed(m: int, n: int, k: int) -> float:
    """Times two terms that three may take."""
    return ALLOWED[0] if products_us(m, n, k) > read_us(n, k) else ALLOWED[1]


class Ratio(NamedTuple):
    """Three terms over two in one row, and what is allowed."""

    size: str
    m: int
    times: float
    most: float

    def __str__(self) -> str:
        return f"{self.size.replace('x', ' x ')}, M = {self.m:,}"


def ratios(*results: Values) -> list[Ratio]:
    """Of every row with both; where several results have a row, the first's."""
    found: dict[tuple[str, int], Ratio] = {}
    for size, cases in (item for values in results for item in values.items()):
        n, k = map(int, size.split("x"))
        for m, row in cases.items():
            if ("router-2", "ours") in row and ("router-3", "ours") in row:
                times = row["router-3", "ours"] / row["router-2", "ours"]
                found.setdefault((size, m), Ratio(size, m, times, allowed(m, n, k)))
    return list(found.values())


def three_terms(times: Values, few: Values) -> str:
    """A line: the largest ratio of either kind of row, and the rows that are over what is allowed.

    times: the table's. few: those of few tokens at more sizes, which may be of two terms alone.
    """
    rows = ratios(times, few)
    kinds = []
    for most, where in zip(ALLOWED, ("longer than the read of the fp32 weight", "no longer than that"), strict=True):
        kind = [row for row in rows if row.most == most]
        worst = max(kind, key=lambda row: row.times)
        kinds.append(
            f"at most {worst.times:.2f} times as long in the {len(kind)} rows where three products take {where} "
            f"({most} allowed; {worst})"
        )
    more = len(rows) - len(ratios(times))
    over = "; ".join(f"{row}: {row.times:.2f}" for row in rows if row.times > row.most)
    return (
        f"Three terms beside two: {', and '.join(kinds)}. Products by arithmetic at {TENSOR_FLOPS / 1e12:.0f} TFLOP/s, "
        f"the read as a plain streaming kernel takes it; {len(rows) - more} rows above"
        + (f" and {more} of `{DECODE.parent.name}/{DECODE.name}`" if more else "")
        + f". Over what is allowed: {over or 'none'}."
    )


def few_tokens(document: Mapping) -> str:
    """Markdown: two terms beside cuBLAS fp32 for up to FEW tokens, and the rows that are over what is allowed."""
    times = {
        size: {m: row for m, row in cases.items() if m <= FEW}
        for size, cases in values_of(document, "cold", "us").items()
    }
    columns = sorted({m for cases in times.values() for m in cases})
    fp32 = ("router-2", "cuBLAS fp32")

    def gains(op: str) -> dict[str, float]:
        """How many times as long cuBLAS takes, by the name of each row that has that operator."""
        return {
            f"{size.replace('x', ' x ')}, M = {m}": row[fp32] / row[op, "ours"]
            for size, cases in times.items()
            for m, row in cases.items()
            if (op, "ours") in row
        }

    ours, plain = gains("router-2"), gains("linear-3")
    over = "; ".join(f"{name}: {1 / gain:.2f}" for name, gain in ours.items() if gain * OVER_CUBLAS < 1)
    where = f"{DECODE.parent.name}/{DECODE.name}"
    text = (
        f"Up to {FEW} tokens, {document['date']} (`{where}`): microseconds a call of two terms / of cuBLAS fp32 in the "
        f"same run, which takes {min(ours.values()):.2f} to {max(ours.values()):.1f} times as long"
    )
    if plain:
        text += f" ({min(plain.values()):.2f} to {max(plain.values()):.1f} times `linear`'s three terms)"
    lines = [
        f"{text}. More than {100 * OVER_CUBLAS - 100:.0f} % over cuBLAS fp32: {over or 'none'}.",
        "",
        "| N x K | " + " | ".join(f"M = {m}" for m in columns) + " |",
        "|---|" + "--:|" * len(columns),
    ]
    for size, cases in times.items():
        cells = [f"{cases[m]['router-2', 'ours']:.1f} / {cases[m][fp32]:.1f}" if m in cases else "" for m in columns]
        lines.append(f"| {size.replace('x', ' x ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def choices(document: Mapping) -> str:
    """Markdown: route beside its scores alone, and torch's softmax and topk of them."""
    times = values_of(document, "cold", "us")
    columns = sorted({m for cases in times.values() for m in cases})
    providers = ("ours", "scores alone", "scores, torch's softmax and topk")
    rows = [row for cases in times.values() for row in cases.values()]
    gains = [row["route-2", providers[2]] / row["route-2", "ours"] for row in rows]
    lines = [
        f"The choice of experts, {document['date']} (`{ROUTE.parent.name}/{ROUTE.name}`): microseconds a call of "
        "`route` (softmax, two terms) / of its scores alone / of scores, torch's softmax and topk, which take "
        f"{min(gains):.1f} to {max(gains):.1f} times as long as `route`.",
        "",
        "| N x K, k | " + " | ".join(f"M = {m:,}" for m in columns) + " |",
        "|---|" + "--:|" * len(columns),
    ]
    for size, cases in times.items():
        name = size.replace("x", " x ").replace(" k=", ", ")
        cells = [" / ".join(f"{cases[m]['route-2', each]:.1f}" for each in providers) for m in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(document: Mapping, decode: Mapping, route: Mapping) -> str:
    """Markdown: microseconds of every case, and the largest errors."""
    times, errors = values_of(document, "cold", "us"), values_of(document, "error", "largest")
    heads = [heading for _, heading, _, _ in SERIES]
    lines = [
        f"Microseconds a call on one {document['device']}, {document['date']}: CUDA graph replay, cold, peers in the "
        "same run (cuBLAS fp32 and TF32 with the cast of the activations); and the largest error against float64 on "
        "standard-normal inputs.",
        "",
        "| N x K | M | "
        + " | ".join(heads)
        + " | faster than fp32 | 3 / 2 terms, allowed | error: 2 terms | 3 terms | fp32 | TF32 | bf16 |",
        "|---" * 2 + "|--:" * (len(heads) + 7) + "|",
    ]
    more = {(row.size, row.m): f"{row.times:.2f}, {row.most}" for row in ratios(times)}
    for size, cases in times.items():
        for m, row in cases.items():
            us = [f"{row[key]:.1f}" for key, *_ in SERIES]
            gain = row["router-2", "cuBLAS fp32"] / row["router-2", "ours"]
            largest = [f"{errors[size][m][key]:.1e}" for key, *_ in SERIES]
            name = size.replace("x", " x ")
            lines.append(f"| {name} | {m:,} | " + " | ".join([*us, f"{gain:.1f}x", more[size, m], *largest]) + " |")
    below = [three_terms(times, values_of(decode, "cold", "us")), few_tokens(decode), choices(route)]
    return "\n\n".join(["\n".join(lines), *below])


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and 2 and 5 times them where the range is short, within [low, high]."""
    steps = (1, 2, 5) if high / low < 200 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [s * 10.0**e for e in exponents for s in steps if low * 0.999 <= s * 10.0**e <= high * 1.001]


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.0e}".replace("e-0", "e-")


def plot(values: Values, title: str, unit: str) -> str:
    """An SVG with a panel for each size: both axes logarithmic, the same y axis for all."""
    numbers = [v for cases in values.values() for row in cases.values() for v in row.values()]
    low, high = min(numbers) / 1.3, max(numbers) * 1.3
    total_width = LEFT + len(values) * (WIDTH + GAP)
    total_height = TOP + HEIGHT + 48

    def y_of(value: float) -> float:
        return TOP + HEIGHT * (1 - math.log(value / low) / math.log(high / low))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width}" height="{total_height}" '
        f'viewBox="0 0 {total_width} {total_height}" font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{total_width}" height="{total_height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">{title}</text>',
    ]
    x = LEFT
    for _, heading, colour, dashes in SERIES:
        parts.append(
            f'<line x1="{x}" y1="32" x2="{x + 22}" y2="32" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dashes}"/><text x="{x + 27}" y="36">{heading}</text>'
        )
        x += 52 + 6 * len(heading)
    for index, (size, cases) in enumerate(values.items()):
        left = LEFT + index * (WIDTH + GAP)
        first, last = min(cases), max(cases)

        def x_of(m: int, left: int = left, first: int = first, last: int = last) -> float:
            return left + WIDTH * math.log(m / first) / math.log(last / first)

        parts.append(
            f'<text x="{left + WIDTH / 2}" y="{TOP - 6}" text-anchor="middle">{size.replace("x", " x ")}</text>'
        )
        for tick in _ticks(low, high):
            y = y_of(tick)
            parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" stroke="#e3e3e3"/>')
            if index == 0:
                parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{_label(tick)}</text>')
        bottom = TOP + HEIGHT
        for m in cases:
            parts.append(
                f'<text x="{x_of(m):.1f}" y="{bottom + 14}" text-anchor="middle" font-size="9">{_label(m)}</text>'
            )
        parts.append(f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>')
        for key, _, colour, dashes in SERIES:
            points = " ".join(f"{x_of(m):.1f},{y_of(row[key]):.1f}" for m, row in cases.items())
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
                f'stroke-dasharray="{dashes}"/>'
            )
    parts.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 36}">M, tokens; {unit}; N x K above each panel</text>')
    return "\n".join([*parts, "</svg>", ""])


def outputs(document: Mapping, readme: str) -> dict[pathlib.Path, str]:
    """What every file should hold. ValueError where the README has not both markers once."""
    where = f"{document['device']}, {document['date']}"
    latency = plot(values_of(document, "cold", "us"), f"Latency of router scores, {where}", "microseconds a call, cold")
    error = plot(values_of(document, "error", "largest"), f"Largest error, {where}", "against float64, standard normal")
    decode, route = (json.loads(each.read_text()) for each in (DECODE, ROUTE))
    return {
        README: between(readme, RESULTS_BEGIN, RESULTS_END, table(document, decode, route)),
        RESULTS.with_name("latency.svg"): latency,
        RESULTS.with_name("error.svg"): error,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    return command(outputs, RESULTS, README, __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    sys.exit(main())
