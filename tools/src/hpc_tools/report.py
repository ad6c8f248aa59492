"""The demo's report, for a terminal and as JSON."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import operators, tables
from .demo import Report
from .requests import SOURCE
from .schedules import TILE_TOKENS, Comparison
from .steps import Outcome


def _number(value: float) -> str:
    """A few significant digits, whole numbers as such."""
    return f"{int(value)}" if float(value).is_integer() else f"{value:.2g}"


def _time_text(outcome: Outcome) -> str:
    if outcome.microseconds is not None:
        return f"{outcome.microseconds:.1f} / {outcome.floor:.1f} us"
    if outcome.milliseconds is None:
        return ""
    return f"{outcome.milliseconds:.{1 if outcome.milliseconds < 10 else 0}f} ms"


def _operator_table(outcomes: list[Outcome]) -> Table:
    """A row for each check; beside the first ones the operator, and below its name what came out."""
    table = tables.plain("Operators, held to float64")
    for name in ("operator", "ran on", "check"):
        table.add_column(name, no_wrap=True)
    on_gpu = any(outcome.microseconds is not None for outcome in outcomes)
    for name in ("error", "at most", "time / floor" if on_gpu else "time"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        if not outcome.device:
            table.add_row(
                f"[bold]{outcome.operator}[/bold]", "[yellow]not run[/yellow]", outcome.note, end_section=True
            )
            continue
        for number, check in enumerate(outcome.checks):
            name = ("[bold]" + outcome.operator + "[/bold]", f"[dim]{escape(outcome.result)}[/dim]", "")[min(number, 2)]
            place, spent = (outcome.device, _time_text(outcome)) if number == 0 else ("", "")
            color = "green" if check.ok else "bold red"
            error = f"[{color}]{_number(check.error)}[/{color}]"
            last = number == len(outcome.checks) - 1
            table.add_row(name, place, check.name, error, _number(check.tolerance), spent, end_section=last)
    return table


def _schedule_table(comparison: Comparison) -> Table:
    table = tables.plain(
        f"Schedule: {comparison.total_tiles:,} tiles of {TILE_TOKENS} tokens on {comparison.num_ctas} CTAs, "
        f"at least {comparison.lower_bound:,} for one"
    )
    table.add_column("", no_wrap=True)
    for name in ("CTAs", "pieces", "empty", "largest", "mean", "/ least"):
        table.add_column(name, justify="right")
    for number, schedule in enumerate(comparison.schedules):
        ratio = f"{schedule.largest / comparison.lower_bound:.2f}" if comparison.lower_bound else "-"
        figures = (schedule.used, schedule.pieces, schedule.empty, schedule.largest)
        cells = [schedule.name, *(f"{figure:,}" for figure in figures), f"{schedule.mean:.1f}", ratio]
        table.add_row(*cells, style="bold" if number == 0 else None)
    return table


def show(report: Report, console: Console) -> None:
    """Print the report for people."""

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    line("[bold]One MoE layer, one decode step[/bold]")
    line(f"  layer   {report.shape.name}")
    for part in report.shape.describe():
        line(f"          {part}")
    line(f"  batch   {report.batch.describe()}")
    line(f"          {report.batch.source}")
    line(f"  device  {report.gpu or f'CPU ({report.gpu_note})'}")
    console.print()
    console.print(_schedule_table(report.comparison))
    if report.comparison.floor > report.comparison.lower_bound:
        line(f"  The plan lets a CTA have {report.comparison.floor} tiles: more cuts would cost more.")
    elif report.comparison.schedules[0].largest > report.comparison.lower_bound:
        line("  A CTA with many pieces has fewer tiles than others: a piece costs time, however short.")
    console.print()
    console.print(_operator_table(report.outcomes))
    for note in dict.fromkeys(outcome.note for outcome in report.outcomes if outcome.device and outcome.note):
        names = ", ".join(outcome.operator for outcome in report.outcomes if outcome.note == note)
        line(f"  {names}: {note}")
    if any(outcome.milliseconds is not None for outcome in report.outcomes):
        line("  ms: one first call on the CPU, whose code is made to be right, not fast.")
    if any(outcome.microseconds is not None for outcome in report.outcomes):
        line("  us: a cold call by graph replay, beside the least time that reading or arithmetic takes.")
    console.print()
    missing = [outcome.operator for outcome in report.outcomes if not outcome.device]
    ran = len(report.outcomes) - len(missing)
    failed = [outcome.operator for outcome in report.outcomes if not outcome.ok]
    if failed:
        line(f"[bold red]Out of tolerance: {', '.join(failed)}.[/bold red]")
    elif ran:
        line(f"[bold green]All {ran} results within tolerance.[/bold green]")
    if missing:
        line(f"[yellow]Not run: {', '.join(missing)}.[/yellow]")


def as_json(report: Report) -> dict[str, Any]:
    """The report ready for JSON; everything that the terminal shows, and the lengths and loads themselves."""
    return {
        "ok": report.ok,
        "device": report.gpu or "cpu",
        "no_gpu": report.gpu_note,
        "layer": {**vars(report.shape)},
        "batch": {"source": report.batch.source, "figures": SOURCE, "seq_lens": report.batch.lengths},
        "schedule": {
            "tile_tokens": TILE_TOKENS,
            "num_ctas": report.comparison.num_ctas,
            "total_tiles": report.comparison.total_tiles,
            "lower_bound": report.comparison.lower_bound,
            "floor": report.comparison.floor,
            "schedules": [
                {
                    "name": schedule.name,
                    "used_ctas": schedule.used,
                    "pieces": schedule.pieces,
                    "empty_pieces": schedule.empty,
                    "largest": schedule.largest,
                    "mean": schedule.mean,
                    "loads": list(schedule.loads),
                }
                for schedule in report.comparison.schedules
            ],
        },
        "operators": [
            {
                "operator": outcome.operator,
                "device": outcome.device or None,
                "note": outcome.note,
                "result": outcome.result,
                "checks": [{**vars(check), "ok": check.ok} for check in outcome.checks],
                "milliseconds": outcome.milliseconds,
                "microseconds": outcome.microseconds,
                "floor": outcome.floor,
            }
            for outcome in report.outcomes
        ],
        "build": operators.builds(),
    }
