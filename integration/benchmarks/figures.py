"""The README's table of serving and its plot, made from results/h200.json.

    uv run python integration/benchmarks/figures.py [--check]

Writes the table between its markers in ../README.md, and results/tpot.svg. --check writes nothing and exits with 1
where one of them is out of date.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_common.generated import RESULTS_BEGIN, RESULTS_END, between, command

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "h200.json"
README = HERE.parent / "README.md"

# Milliseconds a token of the same model, SGLang and GPU in runs of 2026-11-29: with upstream's package under the names
# hpc_ops, and the goal, at which attention and experts would run at their kernels' goals and the rest as it is.
UPSTREAM = {"1x1K": 4.94, "8x1K": 7.30, "32x1K": 11.07, "1x32K+15x1K": 9.87, "64x1K": 13.10}
GOALS = {"1x1K": 4.6, "8x1K": 6.9, "32x1K": 10.2, "1x32K+15x1K": 8.9, "64x1K": 12.0}
NAMES = {"azure": "azure, 64 requests"}
# backend, heading, colour
SERIES = (("hpc", "hpc", "#1f6fb4"), ("default", "fa3 + triton", "#7f8c8d"))
GROUP, BAR, HEIGHT, LEFT, TOP = 96, 34, 240, 46, 56


def measured(document: Mapping[str, Any], value: str) -> dict[str, dict[str, float]]:
    """``value`` by row and backend."""
    found: dict[str, dict[str, float]] = {}
    for entry in document["rows"]:
        if entry.get(value) is not None:
            found.setdefault(entry["row"], {})[entry["backend"]] = entry[value]
    return found


def table(document: Mapping[str, Any]) -> str:
    """Markdown: ms a token beside the default's, the goal and upstream's; TTFT; both backends' throughput."""
    steps, ttft, rate = (measured(document, value) for value in ("step_ms", "ttft_ms", "tokens_per_s"))
    lines = [
        f"A model of Qwen3-30B-A3B-FP8's shape with dummy weights on one {document['device']}, {document['date']},",
        f"SGLang {document['sglang']}: ms a token (a decode step of the whole batch, by SGLang's own count) with this",
        "package and with SGLang's default there, attention by fa3, experts by triton, both engines in one run, asked",
        "in turns; TTFT is the whole batch's, in ms. Beside them, of runs of 2026-11-29, upstream's package under",
        "`hpc_ops`, and a goal: attention and experts at their kernels' goals, the rest as it is.",
        "",
        "| requests | ms a token | fa3 + triton | | goal | upstream | tokens/s | fa3 + triton | TTFT | fa3 + triton |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row, times in steps.items():
        ours, theirs = times["hpc"], times["default"]
        goal, upstream = (f"{known[row]}" if row in known else "" for known in (GOALS, UPSTREAM))
        values = [f"{ours:.2f}", f"{theirs:.2f}", f"{100 * (ours / theirs - 1):+.0f} %", goal, upstream]
        values += [f"{each[row][name]:,.0f}" for each in (rate, ttft) for name in ("hpc", "default")]
        lines.append(f"| {' | '.join([NAMES.get(row, row), *values])} |")
    return "\n".join(lines)


def plot(document: Mapping[str, Any]) -> str:
    """An SVG of bars: a group a row, a bar a backend, and a line for each goal."""
    tpot = measured(document, "step_ms")
    high = 1.1 * max(value for times in tpot.values() for value in times.values())
    width, height = LEFT + GROUP * len(tpot) + 12, TOP + HEIGHT + 40

    def y_of(value: float) -> float:
        return TOP + HEIGHT * (1 - value / high)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">Milliseconds a token, SGLang {document["sglang"]}, '
        f"{document['device']}, {document['date']}</text>",
    ]
    for number, (_, heading, colour) in enumerate(SERIES):
        x = LEFT + 110 * number
        parts.append(
            f'<rect x="{x}" y="28" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="38">{heading}</text>'
        )
    x = LEFT + 110 * len(SERIES)
    parts.append(f'<line x1="{x}" y1="34" x2="{x + 22}" y2="34" stroke="#c0392b" stroke-width="2"/>')
    parts.append(f'<text x="{x + 27}" y="38">goal</text>')
    for tick in range(0, int(high) + 1, 2):
        parts.append(
            f'<line x1="{LEFT}" y1="{y_of(tick):.1f}" x2="{width - 12}" y2="{y_of(tick):.1f}" stroke="#e3e3e3"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for group, (row, times) in enumerate(tpot.items()):
        left = LEFT + GROUP * group + (GROUP - BAR * len(SERIES)) / 2
        for number, (backend, _, colour) in enumerate(SERIES):
            top = y_of(times[backend])
            place = f'x="{left + BAR * number:.1f}" y="{top:.1f}" width="{BAR - 3}" height="{TOP + HEIGHT - top:.1f}"'
            parts.append(f'<rect {place} fill="{colour}"/>')
        if row in GOALS:
            y, right = y_of(GOALS[row]), left + BAR * len(SERIES) - 3
            parts.append(
                f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke="#c0392b" stroke-width="2"/>'
            )
        middle = left + BAR * len(SERIES) / 2
        parts.append(f'<text x="{middle:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{row}</text>')
    parts.append(f'<text x="{LEFT}" y="{height - 8}">requests x tokens of their prompts</text>')
    return "\n".join([*parts, "</svg>", ""])


def outputs(document: Mapping[str, Any], readme: str) -> dict[pathlib.Path, str]:
    """What every file should hold. ValueError where the README has not both markers once."""
    return {
        README: between(readme, RESULTS_BEGIN, RESULTS_END, table(document)),
        RESULTS.with_name("tpot.svg"): plot(document),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check."""
    about = "The README's table and the plot of serving"
    return command(outputs, RESULTS, README, about, arguments)


if __name__ == "__main__":
    sys.exit(main())
