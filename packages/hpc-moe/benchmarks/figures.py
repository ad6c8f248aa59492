"""The README's table of measured times and a plot against tokens, made from results/h200.json.

    uv run python packages/hpc-moe/benchmarks/figures.py [--check]

Writes the table between its markers in ../README.md, and results/latency.svg. --check writes nothing and exits with 1
where one of them is out of date.
"""

import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hpc_common.generated import RESULTS_BEGIN, RESULTS_END, between, command
from hpc_common.timing import floor_us

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "h200.json"
README = HERE.parent / "README.md"
TOP_K = 8

# op (None: the floor), heading, colour, dashes
SERIES = (
    ("moe-tensor", "per tensor", "#1f6fb4", ""),
    ("moe-block", "by block", "#0b3d66", "6 3"),
    (None, "floor", "#7f8c8d", "2 3"),
)
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 260, 52, 62, 24


@dataclass(frozen=True)
class Shape:
    """A layer as moe.py measures it: experts here, experts that ids are drawn from, H, I, and a sentence."""

    experts: int
    drawn: int
    hidden: int
    intermediate: int
    text: str


SHAPES = {
    "hy3-tp8": Shape(192, 192, 4096, 192, "192 experts, H 4096, I 192 (tensor parallelism 8)"),
    "hy3-ep8": Shape(24, 24, 4096, 1536, "24 experts, all ids local, H 4096, I 1536"),
    "hy3-ep8-global": Shape(24, 192, 4096, 1536, "the same 24 of 192 experts, ids of all"),
    "qwen3-30b": Shape(128, 128, 2048, 768, "128 experts, H 2048, I 768"),
}


def floor_of(shape: Shape, tokens: int) -> float:
    """Least time: the weights of the experts that uniform ids hit, read once, or the arithmetic in e4m3."""
    hit = shape.experts * (1 - (1 - TOP_K / shape.drawn) ** tokens)
    size = 3 * shape.hidden * shape.intermediate
    rows = tokens * TOP_K * shape.experts / shape.drawn
    return floor_us(hit * size, 2 * rows * size, torch.float8_e4m3fn)


def times_of(document: Mapping) -> dict[str, dict[int, dict[str | None, float]]]:
    """Microseconds by shape, tokens and op, the floor under None."""
    times: dict[str, dict[int, dict[str | None, float]]] = {}
    for row in document["rows"]:
        if row["provider"] == "ours" and row["mode"] == "cold":
            shape, tokens = row["case"].split(" m=")
            cases = times.setdefault(shape, {}).setdefault(int(tokens), {None: floor_of(SHAPES[shape], int(tokens))})
            cases[row["op"]] = row["us"]
    return {shape: dict(sorted(cases.items())) for shape, cases in times.items()}


def table(document: Mapping) -> str:
    """Markdown: microseconds of every case beside its floor; a time that the results leave out is empty."""
    kernels = document["build"]["hpc_moe"].get("committed_as") or document["build"]["hpc_moe"]["git"]
    lines = [
        f"Microseconds a call on one {document['device']}, {document['date']}, kernels of {kernels}: CUDA graph",
        "replay, cold, top-8, e4m3 activations, uniform ids. Floor: what a streaming kernel takes for the weights of",
        "the experts hit, or the arithmetic at 1.3 PFLOP/s.",
        "",
        "| layer | tokens | per tensor | by block | floor |",
        "|---|--:|--:|--:|--:|",
    ]
    for shape, cases in times_of(document).items():
        for tokens, us in cases.items():
            values = " | ".join(f"{us[op]:.1f}" if op in us else "" for op, *_ in SERIES)
            lines.append(f"| {shape} | {tokens:,} | {values} |")
    lines += ["", *(f"`{name}`: {shape.text}." for name, shape in SHAPES.items())]
    return "\n".join(lines)


def plot(document: Mapping) -> str:
    """An SVG with a panel for each layer: both axes logarithmic, the same y axis for all."""
    times = times_of(document)
    numbers = [us for cases in times.values() for row in cases.values() for us in row.values()]
    low, high = min(numbers) / 1.3, max(numbers) * 1.3
    total_width, total_height = LEFT + len(times) * (WIDTH + GAP), TOP + HEIGHT + 48

    def y_of(value: float) -> float:
        return TOP + HEIGHT * (1 - math.log(value / low) / math.log(high / low))

    title = f"fused_moe, {document['device']}, {document['date']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width}" height="{total_height}" '
        f'viewBox="0 0 {total_width} {total_height}" font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{total_width}" height="{total_height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">{title}</text>',
    ]
    for index, (_, heading, colour, dashes) in enumerate(SERIES):
        x = LEFT + 110 * index
        parts.append(
            f'<line x1="{x}" y1="32" x2="{x + 22}" y2="32" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dashes}"/><text x="{x + 27}" y="36">{heading}</text>'
        )
    for index, (name, cases) in enumerate(times.items()):
        left, first, last = LEFT + index * (WIDTH + GAP), min(cases), max(cases)

        def x_of(tokens: int, left: int = left, first: int = first, last: int = last) -> float:
            return left + WIDTH * math.log(tokens / first) / math.log(last / first)

        parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP - 6}" text-anchor="middle">{name}</text>')
        for tick in (5, 10, 20, 50, 100, 200, 500, 1000):
            if low <= tick <= high:
                y = y_of(tick)
                parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" stroke="#e3e3e3"/>')
                if index == 0:
                    parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
        for tokens in cases:
            place = f'x="{x_of(tokens):.1f}" y="{TOP + HEIGHT + 14}"'
            parts.append(f'<text {place} text-anchor="middle" font-size="9">{tokens}</text>')
        parts.append(f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>')
        for op, _, colour, dashes in SERIES:
            points = " ".join(f"{x_of(tokens):.1f},{y_of(us[op]):.1f}" for tokens, us in cases.items() if op in us)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
                f'stroke-dasharray="{dashes}"/>'
            )
    parts.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 36}">tokens; microseconds a call, cold</text>')
    return "\n".join([*parts, "</svg>", ""])


def outputs(document: Mapping, readme: str) -> dict[pathlib.Path, str]:
    """What every file should hold. ValueError where the README has not both markers once."""
    return {
        README: between(readme, RESULTS_BEGIN, RESULTS_END, table(document)),
        RESULTS.with_name("latency.svg"): plot(document),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    return command(outputs, RESULTS, README, __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    sys.exit(main())
