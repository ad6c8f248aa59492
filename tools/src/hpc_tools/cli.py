"""The command ``hpc``.

Exit status: 0 where everything is right, 1 where a result is out of tolerance (demo), an installed package is broken or
SGLang would not start (doctor), the table is out of date (docs --check) or the output cannot be written, 2 for input
that cannot be used, with one line that says why.
"""

import json
import os
import pathlib
from typing import Annotated

import typer
from rich.console import Console

from .errors import InputError, whole_number

# Commands import what they need when they run: torch takes seconds, and `hpc --help` should not.

app = typer.Typer(
    help="Operators for serving MoE models on Hopper GPUs: demo, doctor, tuning and documents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

tune_app = typer.Typer(help="Measure an operator's choices on this machine's GPU.", no_args_is_help=True)
app.add_typer(tune_app, name="tune")


@app.command()
def demo(
    service: Annotated[
        str | None, typer.Option(help="Whose request lengths: code or conversation (the default).")
    ] = None,
    trace: Annotated[
        pathlib.Path | None,
        typer.Option(help="CSV file of requests: TIMESTAMP, ContextTokens, GeneratedTokens.", metavar="FILE"),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Cached tokens of each request, e.g. 1x128K+31x4K.", metavar="LENGTHS")
    ] = None,
    requests: Annotated[
        str | None, typer.Option(help="Requests in the batch; 32 unless --lengths is given.", metavar="INTEGER")
    ] = None,
    seed: Annotated[str, typer.Option(help="Of the drawn lengths and of all values.", metavar="INTEGER")] = "0",
    plot: Annotated[
        pathlib.Path | None, typer.Option(help="Write a picture of the load per CTA, PNG.", metavar="PATH")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """One MoE layer's decode step on real request lengths, every operator checked against float64."""
    from . import demo as main_job
    from . import picture, report
    from .progress import BarProgress, Progress

    # Read here rather than by the parser of options, which takes 1_0 and repeats a number of any length.
    count = None if requests is None else whole_number(requests, "--requests")
    seed_number = whole_number(seed, "--seed")
    batch = main_job.choose_batch(service, trace, lengths, count, seed_number)
    if plot is not None:
        picture.check_path(plot)
    with Progress() if as_json else BarProgress() as progress:
        result = main_job.run(batch, seed_number, progress)
    if as_json:
        typer.echo(json.dumps(report.as_json(result), indent=1))
    else:
        report.show(result, Console())
    if plot is not None:  # after the results: a disk that fills up meanwhile costs the picture alone
        picture.draw(plot, result.comparison, f"{batch.describe()}; {batch.source}")
        if not as_json:
            typer.echo(f"Picture: {plot}")
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def doctor(
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SGLANG FLAGS]", help="What SGLang would use of it under these, --model-path too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """What is installed here, in which version and build, and what would run where and why not."""
    from . import doctor as examination

    result = examination.examine(flags or [])
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        examination.show(result, Console())
    if not examination.healthy(result) or (result["sglang"] or {}).get("refused"):
        raise typer.Exit(1)


@app.command()
def docs(
    readme: Annotated[pathlib.Path, typer.Argument(help="The document with the table.")] = pathlib.Path("README.md"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 where the table is out of date.")
    ] = False,
) -> None:
    """Write the README's status table from the capability tables of the installed operators."""
    from . import documents, operators

    differed = documents.update(readme, operators.installed(), check)
    state = ("is out of date; run hpc docs" if check else "updated") if differed else "is up to date"
    typer.echo(f"{readme}: the status table {state}")
    if differed and check:
        raise typer.Exit(1)


@tune_app.command("router")
def tune_router(
    out: Annotated[pathlib.Path, typer.Option(help="The file to write.", metavar="FILE")] = pathlib.Path(
        "router-tuned.json"
    ),
    size: Annotated[
        list[str] | None,
        typer.Option(help="N x K of a router's weight, e.g. 192x4096; may be repeated.", metavar="NxK"),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Numbers of tokens, e.g. 1,64,512; a row serves those up to it.", metavar="LIST")
    ] = None,
    configs: Annotated[str, typer.Option(help="Configs tried for each case.", metavar="INTEGER")] = "16",
) -> None:
    """Measure the router GEMM's Configs and cuBLAS fp32 on this GPU; HPC_ROUTER_TUNED=FILE then uses them."""
    from . import tuning

    count = whole_number(configs, "--configs")
    rows = tuning.router(out, size or [], tokens, count, lambda line: typer.echo(line, err=True))
    typer.echo(f"{out}: {rows} rows; HPC_ROUTER_TUNED={out} in the environment uses them")


def main() -> None:
    """Entry point: bad input is one line on standard error and exit status 2, output that cannot be written 1.

    Everything that prints flushes, so errors of writing come from the command itself. A reader that left, such as head,
    is no error to speak of: Typer and Rich end quietly with 1.
    """
    try:
        app()
    except InputError as error:
        typer.echo(f"hpc: {error}", err=True)
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno is None or error.filename is not None:  # not from writing to a stream
            raise
        # What is still buffered goes nowhere, or the interpreter tries again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        typer.echo(f"hpc: standard output: {error.strerror}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
