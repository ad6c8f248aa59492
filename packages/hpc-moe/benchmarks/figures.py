"""The README's table of measured times and a plot against tokens, made from results/h200.json. DESIGN.md's tables of
the best public implementations (public.json), peers, bf16 activations, bf16 weights, launches and unequal experts, from
it and the files beside it.

    uv run python packages/hpc-moe/benchmarks/figures.py [--check]

Writes the tables between their markers in ../README.md and ../DESIGN.md, and results/latency.svg. --check writes
nothing and exits with 1 where one of them is out of date.
"""

import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from hpc_common.generated import RESULTS_BEGIN, RESULTS_END, between, command
from hpc_common.timing import floor_us

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "h200.json"
README, DESIGN = HERE.parent / "README.md", HERE.parent / "DESIGN.md"
PUBLIC = HERE / "public.json"  # other implementations on the same card, and goals
DESIGN_BEGIN = "<!-- results: begin; written by benchmarks/figures.py from benchmarks/results -->"
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


def kernels(document: Mapping) -> str:
    """The commit that was measured."""
    build = document["build"]["hpc_moe"]
    return build.get("committed_as") or build["git"]


def public() -> dict[tuple[str, str], Mapping]:
    """Rows of public.json by (op, case)."""
    return {(row["op"], row["case"]): row for row in json.loads(PUBLIC.read_text())["rows"]}


def beside_public(document: Mapping, op: str) -> dict[str, float]:
    """How many times as long the best public implementation takes, by case."""
    known, ours = public(), (op, "ours")
    return {
        case: min(known[op, case]["us"].values()) / rows[ours]["us"]
        for case, rows in by_case(document).items()
        if ours in rows and (op, case) in known
    }


def mean(gains: Mapping[str, float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, gains.values())) / len(gains))


def table(document: Mapping) -> str:
    """Markdown: microseconds of every case beside its floor; a time that the results leave out is empty."""
    lines = [
        f"Microseconds a call on one {document['device']}, {document['date']}, kernels of {kernels(document)}: CUDA",
        "graph replay, cold, top-8, e4m3 activations, uniform ids. Floor: what a streaming kernel takes for the",
        "weights of the experts hit, or the arithmetic at 1.3 PFLOP/s.",
        "",
        "| layer | tokens | per tensor | by block | floor |",
        "|---|--:|--:|--:|--:|",
    ]
    for shape, cases in times_of(document).items():
        for tokens, us in cases.items():
            values = " | ".join(f"{us[op]:.1f}" if op in us else "" for op, *_ in SERIES)
            lines.append(f"| {shape} | {tokens:,} | {values} |")
    lines += ["", *(f"`{name}`: {shape.text}." for name, shape in SHAPES.items())]
    gains = {text: beside_public(document, op) for op, text, *_ in SERIES if op}
    means = " and ".join(f"{mean(each):.2f} {text}" for text, each in gains.items())
    slower = [f"{name} {text} {gain:.2f}" for text, each in gains.items() for name, gain in each.items() if gain < 1]
    lines += [
        "",
        "Times as fast as the best public implementation on the same card (hpc-ops or SGLang's Triton kernels):",
        f"{means} (geometric means of {' and '.join(str(len(each)) for each in gains.values())} rows); "
        + (f"slower: {', '.join(slower)}." if slower else "no row is slower."),
    ]
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


Cells = Mapping[tuple[str, str], Mapping]  # a case's rows by (op, provider)
Column = tuple[str, Callable[[Cells], str]]


def of(op: str, provider: str = "ours", field: str = "us") -> Callable[[Cells], str]:
    """A cell: a row's number; empty where there is no such row."""

    def cell(rows: Cells) -> str:
        value = rows[op, provider].get(field, "") if (op, provider) in rows else ""
        return f"{value:.1f}" if isinstance(value, float) else str(value)

    return cell


def compared(op: str, first: str, second: str, times: bool = False) -> Callable[[Cells], str]:
    """A cell: how much longer ``first`` takes than ``second`` (``times``: times as long); empty without both."""

    def cell(rows: Cells) -> str:
        if not {(op, first), (op, second)} <= rows.keys():
            return ""
        a, b = (rows[op, provider]["us"] for provider in (first, second))
        return f"{a / b:.2f}" if times else f"{a - b:+.1f}"

    return cell


def by_case(document: Mapping) -> dict[str, Cells]:
    """Cold rows of every case: layers as they follow in the file, by tokens."""
    cases: dict[str, dict[tuple[str, str], Mapping]] = {}
    for row in document["rows"]:
        if row.get("mode", "cold") != "cold":
            continue
        cases.setdefault(row["case"], {})[row["op"], row["provider"]] = row
    layers = list(dict.fromkeys(name.split(" m=")[0] for name in cases))
    split = {name: name.split(" m=") for name in cases}
    return dict(sorted(cases.items(), key=lambda item: (layers.index(split[item[0]][0]), int(split[item[0]][1]))))


def grid(cases: Mapping[str, Cells], columns: Sequence[Column]) -> list[str]:
    """Lines of a table, a line a case."""
    lines = [
        f"| layer | tokens | {' | '.join(heading for heading, _ in columns)} |",
        "|---|--:|" + "--:|" * len(columns),
    ]
    for case, rows in cases.items():
        layer, tokens = case.split(" m=")
        lines.append(f"| {layer} | {int(tokens):,} | {' | '.join(cell(rows) for _, cell in columns)} |")
    return [*lines, ""]


OPS = (("moe-tensor", "per tensor"), ("moe-block", "by block"))
TRITON, GROUPED = "SGLang Triton", "torch grouped"
FEW = 256  # tokens: what is asked of calls of no more


def tokens_of(case: str) -> int:
    return int(case.split(" m=")[1])


def few(cases: Mapping[str, Cells]) -> list[tuple[str, Cells]]:
    return [(name, rows) for name, rows in cases.items() if tokens_of(name) <= FEW]


def best_public(document: Mapping) -> list[str]:
    """Ours beside the faster of those in public.json, and goals."""
    known = public()

    def of_public(op: str, goal: bool) -> Callable[[Cells], str]:
        def cell(rows: Cells) -> str:
            row = known[op, rows[op, "ours"]["case"]]
            return f"{row['goal'] if goal else min(row['us'].values()):.1f}"

        return cell

    cases = {
        name: rows
        for name, rows in by_case(document).items()
        if all((op, name) in known and (op, "ours") in rows for op, _ in OPS)
    }
    columns = [
        each
        for op, text in OPS
        for each in ((text, of(op)), ("best public", of_public(op, False)), ("goal", of_public(op, True)))
    ]
    lines = grid(cases, columns)
    for op, text in OPS:
        gains = beside_public(document, op)
        large = {name: gain for name, gain in gains.items() if tokens_of(name) >= 2048}
        met = sum(rows[op, "ours"]["us"] <= known[op, name]["goal"] for name, rows in cases.items())
        lines.append(
            f"{text.capitalize()} {mean(gains):.2f} times as fast (geometric mean of {len(gains)} rows; 1.35 asked), "
            f"{min(gains.values()):.2f} at least; {mean(large):.2f} from 2,048 tokens on ({len(large)} rows; 1.7 "
            f"asked). At their goals {met} rows."
        )
    return lines


def peers(document: Mapping) -> list[str]:
    """Rows that have any."""
    cases = {name: rows for name, rows in by_case(document).items() if any(who != "ours" for _, who in rows)}
    tensor, block = (op for op, _ in OPS)
    columns = [("per tensor", of(tensor)), (TRITON, of(tensor, TRITON)), (GROUPED, of(tensor, GROUPED))]
    lines = grid(cases, [*columns, ("by block", of(block)), (TRITON, of(block, TRITON))])
    spans = []
    for who, (op, text) in ((TRITON, OPS[0]), (TRITON, OPS[1]), (GROUPED, OPS[0])):
        times = [
            rows[op, who]["us"] / rows[op, "ours"]["us"]
            for rows in cases.values()
            if {(op, who), (op, "ours")} <= rows.keys()
        ]
        if times:
            spans.append(f"{who} {text} {min(times):.2f} to {max(times):.2f} times")
    return [*lines, f"As long as ours: {', '.join(spans)}."]


def bf16_x(document: Mapping) -> list[str]:
    cases, bf16 = by_case(document), "ours, bf16 x"
    columns = [
        each
        for op, text in OPS
        for each in ((text, of(op)), ("bf16 x", of(op, bf16)), ("more", compared(op, bf16, "ours")))
    ]
    more = {
        f"{name} {text}": rows[op, bf16]["us"] - rows[op, "ours"]["us"]
        for name, rows in few(cases)
        for op, text in OPS
        if {(op, bf16), (op, "ours")} <= rows.keys()
    }
    worst = max(more, key=lambda name: more[name])
    return [*grid(cases, columns), f"To {FEW} tokens at most {more[worst]:.1f} us more ({worst}); at most 2 asked."]


def bf16_weights(document: Mapping) -> list[str]:
    cases = by_case(document)
    there = {who for rows in cases.values() for _, who in rows}
    return grid(cases, [(who, of("moe-bf16", who)) for who in ("ours", TRITON, GROUPED) if who in there])[:-1]


def launches(document: Mapping) -> list[str]:
    cases, without = by_case(document), "ours without PDL"
    columns = [
        each
        for op, text in OPS
        for each in (
            (f"{text}: kernels", of(op, "ours", "kernels")),
            ("bf16 x", of(op, "ours", "kernels_bf16_x")),
            ("us", of(op)),
            ("without PDL", of(op, without)),
        )
    ]
    rows = [row for _, cells in few(cases) for row in cells.values()]
    most = max(row[field] for row in rows for field in ("kernels", "kernels_bf16_x"))
    pairs = [(cells.get((op, without)), cells.get((op, "ours"))) for _, cells in few(cases) for op, _ in OPS]
    more = [slow["us"] - fast["us"] for slow, fast in pairs if slow and fast]
    text = f"To {FEW} tokens at most {most} kernels (4 asked); without PDL {min(more):.1f} to {max(more):.1f} us more."
    return [*grid(cases, columns), text]


def skew(op: str, first: str, second: str) -> Callable[[Mapping], list[str]]:
    """A table of rows of ``op``, and how many times as long ``first`` takes as ``second``."""

    def make(document: Mapping) -> list[str]:
        cases = {name: rows for name, rows in by_case(document).items() if (op, first) in rows}
        columns = [(who.removeprefix("ours, "), of(op, who)) for who in (first, second)]
        return grid(cases, [*columns, ("times", compared(op, first, second, times=True))])[:-1]

    return make


# Title, results file, lines.
DESIGN_TABLES = (
    ("Ours beside the faster of hpc-ops and SGLang's Triton kernels (`public.json`), and goals", "h200", best_public),
    ("Peers in the same run and rounds", "h200", peers),
    ("bf16 activations, quantised inside, beside e4m3 ones", "h200_bf16_x", bf16_x),
    ("bf16 weights", "h200_bf16_weights", bf16_weights),
    ("Kernels of a call, with e4m3 and with bf16 activations; times with PDL and without", "h200_launches", launches),
    (
        "Zipf's law beside ids uniform over the experts that it hits, per tensor",
        "h200_skew",
        skew("moe-skew-tensor", "ours, zipf", "ours, uniform over the experts hit"),
    ),
    (
        "All tokens on one expert beside the two products of that size",
        "h200_skew",
        skew("moe-one-expert", "ours", "torch._scaled_mm, twice"),
    ),
)


def design_tables(document: Mapping) -> str:
    """DESIGN.md's: of ``document``, which is results/h200.json, and of the files beside it that are there."""
    lines = []
    for title, name, make in DESIGN_TABLES:
        path = RESULTS.with_name(f"{name}.json")
        if name != RESULTS.stem and not path.exists():
            continue
        source = document if name == RESULTS.stem else json.loads(path.read_text())
        command = source["command"].split(" --json")[0]
        about = f"`results/{name}.json`, {source['date']}, kernels of {kernels(source)}, `{command}`"
        lines += [f"{title}, us a call ({about}):", "", *make(source), ""]
    return "\n".join(lines[:-1])


def outputs(document: Mapping, readme: str) -> dict[pathlib.Path, str]:
    """What every file should hold. ValueError where the README or DESIGN.md has not both markers once."""
    return {
        README: between(readme, RESULTS_BEGIN, RESULTS_END, table(document)),
        RESULTS.with_name("latency.svg"): plot(document),
        DESIGN: between(DESIGN.read_text(), DESIGN_BEGIN, RESULTS_END, design_tables(document)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    return command(outputs, RESULTS, README, __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    sys.exit(main())
