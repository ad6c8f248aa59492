"""Decode batches of real request lengths: drawn from the quantiles of two services, or from a trace file.

Source of the quantiles: Azure Public Dataset, "Azure LLM inference trace 2023" (one hour of two services, 2023-11-16;
8,819 requests of ``code``, 19,366 of ``conversation``), CC-BY; Patel et al., "Splitwise: Efficient Generative LLM
Inference Using Phase Splitting", ISCA 2024. Only these figures are part of the project; the traces are not.

A decode batch at one instant holds requests at all stages. A request with c context and g generated tokens shows the
cache lengths c + 1 to c + g and is in the batch in proportion to g. So a draw takes a request (c, g), keeps it with
probability g / max g, and gives it the length c + uniform(1..g).
"""

import csv
import pathlib
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .errors import InputError, whole_number

MAX_REQUESTS = 4096
MAX_LENGTH = 1_048_576
LEVELS = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 0.999, 1.0)
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SOURCE = 'Azure Public Dataset, "Azure LLM inference trace 2023", CC-BY; Patel et al., Splitwise, ISCA 2024'


@dataclass(frozen=True)
class Service:
    """Quantiles of a service's requests at ``LEVELS``, in tokens."""

    context: tuple[int, ...]
    generated: tuple[int, ...]


SERVICES = {
    "code": Service(
        context=(3, 17, 75, 147, 578, 1469, 2745, 5194, 7315, 7436, 7437, 7437),
        generated=(6, 6, 6, 7, 9, 13, 24, 55, 90, 252, 831, 1899),
    ),
    "conversation": Service(
        context=(2, 29, 181, 207, 396, 1020, 1189, 2735, 4083, 4142, 6212, 14050),
        generated=(7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 954, 1000),
    ),
}


def quantile(values: Sequence[int], level: float) -> float:
    """The quantile at ``level`` in [0, 1], linear between the ``values`` given at ``LEVELS``."""
    upper = min(bisect_right(LEVELS, level), len(LEVELS) - 1)
    low, high = LEVELS[upper - 1], LEVELS[upper]
    return values[upper - 1] + (values[upper] - values[upper - 1]) * (level - low) / (high - low)


def _draw(request: Callable[[], tuple[int, int]], most: int, count: int, source: random.Random) -> list[int]:
    """``count`` lengths: requests (c, g) from ``request``, kept with probability g / most, at a uniform stage."""
    lengths: list[int] = []
    while len(lengths) < count:
        context, generated = request()
        if source.random() * most < generated:
            lengths.append(context + 1 + int(source.random() * generated))
    return lengths


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_REQUESTS:
        raise InputError(f"--requests: expected 1 to {MAX_REQUESTS}, got {count}")


def draw(service: str, count: int, seed: int) -> list[int]:
    """``count`` cache lengths of a decode batch of ``service``; the same for the same seed on every machine.

    Context and output are drawn independently by linear interpolation of the quantiles. Raises InputError for an
    unknown service or a count outside 1..4096.
    """
    _check_count(count)
    if service not in SERVICES:
        raise InputError(f"--service: expected {' or '.join(SERVICES)}, got {service}")
    quantiles = SERVICES[service]
    source = random.Random(seed)

    def request() -> tuple[int, int]:
        context = round(quantile(quantiles.context, source.random()))
        return context, round(quantile(quantiles.generated, source.random()))

    return _draw(request, quantiles.generated[-1], count, source)


def _tokens(text: str | None, where: str, column: str) -> int:
    value = whole_number(text or "", f"{where}: {column}")
    if value < 0:
        raise InputError(f"{where}: {column}: expected no negative number, got {value}")
    return value


def _text_lines(lines: Iterable[str], path: pathlib.Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise InputError(f"{path}, line {number}: expected text in UTF-8, got a NUL character")
        yield line


def read_trace(path: pathlib.Path) -> list[tuple[int, int]]:
    """The (context, generated) pairs of a trace: a CSV file with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

    Other columns may stand beside them. Raises InputError, naming file and line, for what cannot be read: no such file,
    no text, a field too long for CSV, a column missing or there twice, a number that is negative, no number or beyond
    1,048,576 tokens in sum, no request that generated anything.
    """
    requests = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(_text_lines(file, path))
            names = list(reader.fieldnames or ())
            missing = [name for name in COLUMNS if name not in names]
            if missing:
                raise InputError(f"{path}: expected the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
            repeated = [name for name in COLUMNS if names.count(name) > 1]
            if repeated:
                raise InputError(f"{path}: expected each column once; more than once: {', '.join(repeated)}")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                context = _tokens(row["ContextTokens"], where, "ContextTokens")
                generated = _tokens(row["GeneratedTokens"], where, "GeneratedTokens")
                if context + generated > MAX_LENGTH:
                    raise InputError(f"{where}: expected at most {MAX_LENGTH} tokens, got {context + generated}")
                requests.append((context, generated))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected a CSV file in UTF-8: {error}") from None
    except csv.Error as error:
        raise InputError(f"{path}: expected a CSV file: {error}") from None
    if not any(generated for _, generated in requests):
        raise InputError(f"{path}: expected at least one request with generated tokens, got none in {len(requests)}")
    return requests


def draw_from_trace(requests: Sequence[tuple[int, int]], count: int, seed: int) -> list[int]:
    """``count`` cache lengths of a decode batch of a trace's (context, generated) pairs, drawn with replacement."""
    _check_count(count)
    source = random.Random(seed)
    most = max(generated for _, generated in requests)
    return _draw(lambda: requests[int(source.random() * len(requests))], most, count, source)
