"""Documents with parts made from results: text between two marker lines, and the command that writes or checks it."""

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Outputs = Callable[[Mapping[str, Any], str], Mapping[pathlib.Path, str]]

# What a package's README has around its measured times.
RESULTS_BEGIN = "<!-- results: begin; written by benchmarks/figures.py from benchmarks/results/h200.json -->"
RESULTS_END = "<!-- results: end -->"


def between(text: str, begin: str, end: str, inside: str) -> str:
    """``text`` with what lies between the lines ``begin`` and ``end`` replaced by ``inside``.

    Raises ValueError where a marker is not there once, or they are in the wrong order.
    """
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected the lines {begin} and {end} once each, in this order")
    return f"{text.split(begin)[0]}{begin}\n{inside}\n{end}{text.split(end)[1]}"


def command(
    outputs: Outputs, results: pathlib.Path, readme: pathlib.Path, about: str, arguments: Sequence[str] | None = None
) -> int:
    """Command line of a benchmark's figures: write every file that ``outputs(document, readme's text)`` names.

    results: the JSON document. about: the help's first line. arguments: a sequence of str, sys.argv's where None.
    Prints a line for each file that is out of date; returns 1 where ``--check`` found one, else 0. Raises ValueError,
    with the readme's path, as ``between`` does.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something is out of date")
    check = parser.parse_args(arguments).check
    document = json.loads(results.read_text())
    try:
        wanted = outputs(document, readme.read_text())
    except ValueError as error:
        raise ValueError(f"{readme}: {error}") from error
    stale = {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.name}: {'out of date' if check else 'written'}")
        if not check:
            path.write_text(text)
    return 1 if check and stale else 0
