"""The plugin that SGLang loads through the entry point group ``sglang.srt.plugins``.

SGLang calls ``register`` in its launcher before it parses arguments, in ``Engine.__init__`` and first thing in every
spawned scheduler. It logs and skips a plugin that raises, so this one never does: each operator is registered by
itself, and what came of it is in ``hpc_sglang.record.record``.

Neither torch nor an operator is imported by importing this module.
"""

import importlib
import re
from dataclasses import dataclass
from importlib import metadata

from . import compat, flags
from .record import ATTENTION, MOE, ROUTER, Record, logger, record


@dataclass(frozen=True)
class Operator:
    """An operator that this package plugs in.

    name: as in the record. distribution: the package that brings it. part: the module of this package whose
    ``register(record)`` plugs it in. works_with: versions of the distribution that this hpc-sglang works with,
    [first, before) as (major, minor); the same range as in this package's metadata.
    """

    name: str
    distribution: str
    part: str
    works_with: tuple[tuple[int, int], tuple[int, int]]


OPERATORS = (
    Operator(ATTENTION, "hpc-attention", "hpc_sglang.attention", ((0, 1), (0, 2))),
    Operator(ROUTER, "hpc-router-gemm", "hpc_sglang.router", ((0, 1), (0, 2))),
    Operator(MOE, "hpc-moe", "hpc_sglang.moe", ((0, 1), (0, 2))),
)


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
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


def why_not_installed(operator: Operator) -> str:
    """Why the operator's package cannot be used here; "" where it is installed in a version this one works with."""
    version = installed(operator.distribution)
    if version is None:
        return f"not installed (pip install {operator.distribution})"
    if not _works_with(operator, version):
        (major, minor), (end_major, end_minor) = operator.works_with
        wanted = f"from {major}.{minor} up to, not including, {end_major}.{end_minor}"
        return f"{operator.distribution} {version} is installed; this hpc-sglang needs a version {wanted}"
    return ""


def register_operator(operator: Operator, into: Record) -> None:
    """Plug one operator in, or write down why not. Never raises."""
    reason = why_not_installed(operator)
    if reason:
        into.not_used(operator.name, reason)
        return
    try:
        importlib.import_module(operator.part).register(into)
    except compat.Missing as error:
        into.not_used(operator.name, str(error))
    except Exception as error:
        text = str(error).strip().splitlines()
        into.not_used(operator.name, f"registering it failed: {type(error).__name__}: {text[0] if text else ''}")
        logger.exception("hpc-sglang: registering %s failed", operator.name)


def register() -> None:
    """SGLang's entry point: every operator by itself; never raises for one of them."""
    for operator in OPERATORS:
        register_operator(operator, record)
    try:
        flags.register(record)
    except Exception:
        logger.exception("hpc-sglang: what is asked for by flag is not checked at start")
