"""The tables' notation for request lengths: ``2x32K+30x4K`` is 2 requests of 32,768 tokens and 30 of 4,096."""

import re
import reprlib
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby

from .checks import fail

_TERM = re.compile(r"(?:([0-9]+)\s*x\s*)?([0-9]+(?:\.[0-9]+)?)\s*([Kk]?)")
_TERM_CHARACTERS = 64  # far above every limit, and below the length that int() refuses


def parse_lengths(text: str, most: int = 1 << 20, requests: tuple[int, int] = (0, 1 << 20)) -> list[int]:
    """Lengths in tokens, in the order written.

    Args:
        text: terms joined by ``+``, each ``COUNTxLENGTH`` or ``LENGTH`` (count 1); K is 1,024 tokens and may follow a
            decimal number (``0.125K`` is 128), as long as the length is whole.
        most: largest length accepted.
        requests: smallest and largest number of requests accepted.

    Raises ValueError for anything else, saying which term; what is long is shortened.
    """
    where = "hpc_common.parse_lengths"
    terms: list[tuple[int, int]] = []
    for term in map(str.strip, text.split("+")):
        if len(term) > _TERM_CHARACTERS:
            fail(where, "lengths", f"terms of at most {_TERM_CHARACTERS} characters", reprlib.repr(term))
        match = _TERM.fullmatch(term)
        if match is None:
            fail(where, "lengths", "terms such as 30x4K joined by +", reprlib.repr(term or text))
        count = int(match[1]) if match[1] else 1
        length = Fraction(match[2]) * (1024 if match[3] else 1)
        if length.denominator != 1:
            fail(where, "lengths", "a whole number of tokens", repr(term))
        if length > most:
            fail(where, "lengths", f"at most {most} tokens a request", repr(term))
        terms.append((count, int(length)))
    total = sum(count for count, _ in terms)
    if not requests[0] <= total <= requests[1]:
        fail(where, "lengths", f"{requests[0]} to {requests[1]} requests", total)
    return [length for count, length in terms for _ in range(count)]


def format_lengths(lengths: Sequence[int]) -> str:
    """The notation of ``lengths``, one term for each run of equal ones; ``parse_lengths`` reads it back."""

    def size(length: int) -> str:
        if length == 0 or length % 64:
            return str(length)
        return f"{length / 1024:.4f}".rstrip("0").rstrip(".") + "K"  # sixteenths of K have four decimals

    return "+".join(f"{sum(1 for _ in run)}x{size(length)}" for length, run in groupby(lengths))
