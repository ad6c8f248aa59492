"""The error for what a user gave and the tools cannot use, and the numbers that users write."""

import re
import reprlib

_MOST_DIGITS = 20  # more than any limit has


class InputError(ValueError):
    """Unusable input; the message is one line for the terminal, and the command exits with status 2."""


def whole_number(text: str, where: str) -> int:
    """The number that ``text`` writes in decimal digits with or without a sign, spaces around it.

    Raises InputError, beginning with ``where``, for anything else (``1_0``, which int() takes, among it) and for more
    than 20 digits.
    """
    text = text.strip()
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise InputError(f"{where}: expected a whole number, got {reprlib.repr(text)}")
    digits = len(text.lstrip("+-"))
    if digits > _MOST_DIGITS:
        raise InputError(f"{where}: expected at most {_MOST_DIGITS} digits, got {digits}")
    return int(text)
