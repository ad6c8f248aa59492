"""The record of what SGLang uses of each operator, and the start-up lines made from it.

SGLang logs and skips a plugin that raises, so what happened to each operator is written here instead. A server's
loggers are configured after its plugins ran; lines are therefore kept until ``announce`` and go out at once after it.
"""

import logging
from dataclasses import dataclass

logger = logging.getLogger("hpc_sglang")

ATTENTION, ROUTER, MOE = "attention", "router", "moe"
OPERATORS = (ATTENTION, ROUTER, MOE)


@dataclass(frozen=True)
class Entry:
    """What is known of one operator: whether SGLang uses it, and how (used) or why not (not used)."""

    operator: str
    used: bool
    detail: str

    def line(self) -> str:
        """The start-up line."""
        return f"{self.operator}: {'used' if self.used else 'not used'}: {self.detail}"


class Record:
    """One entry an operator; a later one replaces an earlier one.

    quiet: keep lines to itself, for all ranks but the first. announcing: whether ``announce`` was called.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.quiet = False
        self.announcing = False
        self._said: set[str] = set()

    def used(self, operator: str, detail: str) -> None:
        """SGLang uses ``operator``; detail: under which flag or name, in a few words."""
        self._put(Entry(operator, True, detail))

    def not_used(self, operator: str, reason: str) -> None:
        """SGLang does not use ``operator``, because of ``reason``."""
        self._put(Entry(operator, False, reason))

    def note(self, line: str) -> None:
        """One more line for people, said once; for what is decided later, e.g. layers that upstream's function runs."""
        self._say(line)

    def reason(self, operator: str) -> str:
        """Why ``operator`` is not used, "" where it is or where nothing is known."""
        entry = self.entries.get(operator)
        return "" if entry is None or entry.used else entry.detail

    def lines(self) -> list[str]:
        """The start-up lines, in the operators' order."""
        known = [name for name in OPERATORS if name in self.entries]
        return [self.entries[name].line() for name in (*known, *(self.entries.keys() - set(OPERATORS)))]

    def announce(self) -> None:
        """Log every line not logged yet; from now on lines are logged as they come. Called once loggers are ready."""
        self.announcing = True
        for line in self.lines():
            self._say(line)

    def _put(self, entry: Entry) -> None:
        if entry.operator not in OPERATORS:
            raise ValueError(f"hpc_sglang.record: operator: expected one of {OPERATORS}, got {entry.operator!r}")
        self.entries[entry.operator] = entry
        if self.announcing:
            self._say(entry.line())

    def _say(self, line: str) -> None:
        if self.quiet or line in self._said:
            return
        self._said.add(line)
        logger.info("hpc-sglang: %s", line)


# The record of this process.
record = Record()
