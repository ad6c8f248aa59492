"""The plugin that SGLang loads through the entry point group ``sglang.srt.plugins``.

SGLang calls ``register`` in its launcher before it parses arguments, in ``Engine.__init__`` and first thing in every
spawned scheduler. It logs and skips a plugin that raises, so this one keeps its own record: what was registered for
each operator, and why not. In this version nothing is registered; the record says so.

Neither torch nor an operator is imported here: every process of a server runs this, also those that need neither.
"""

import logging
import re
from dataclasses import dataclass
from importlib import metadata

logger = logging.getLogger("hpc_sglang")


@dataclass(frozen=True)
class Operator:
    """An operator that this package plugs in.

    name: as the log lines call it. distribution: the package that brings it. works_with: versions of it that this
    hpc-sglang works with, [first, before) as (major, minor); the same range as in this package's metadata.
    """

    name: str
    distribution: str
    works_with: tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Registration:
    """What happened to one operator: installed version (None: not installed), whether SGLang uses it now, why not."""

    operator: str
    distribution: str
    version: str | None
    registered: bool
    reason: str

    def line(self) -> str:
        """The one line that the log and ``python -m hpc_sglang`` show."""
        installed = f"{self.distribution} {self.version}" if self.version else self.distribution
        return f"{self.operator} ({installed}): {'registered' if self.registered else 'not registered'}: {self.reason}"


OPERATORS = (
    Operator("attention", "hpc-attention", ((0, 1), (0, 2))),
    Operator("router GEMM", "hpc-router-gemm", ((0, 1), (0, 2))),
    Operator("fused MoE", "hpc-moe", ((0, 1), (0, 2))),
)

NOT_YET = "this hpc-sglang registers no operator with SGLang yet"


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _works_with(operator: Operator, version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return False
    first, before = operator.works_with
    return first <= (int(numbers[1]), int(numbers[2])) < before


def registrations() -> list[Registration]:
    """What ``register`` does for each operator in this environment, in a fixed order. Has no effect."""
    record = []
    for operator in OPERATORS:
        version = _installed(operator.distribution)
        if version is None:
            reason = f"not installed (pip install {operator.distribution})"
        elif not _works_with(operator, version):
            (major, minor), (end_major, end_minor) = operator.works_with
            reason = f"needs a version from {major}.{minor} up to, not including, {end_major}.{end_minor}"
        else:
            reason = NOT_YET
        record.append(Registration(operator.name, operator.distribution, version, False, reason))
    return record


def register() -> list[Registration]:
    """SGLang's entry point: registers nothing yet, logs one line for each operator that says so, never raises for one.

    Returns the record that it logged.
    """
    record = registrations()
    for registration in record:
        logger.info("hpc-sglang: %s", registration.line())
    return record
