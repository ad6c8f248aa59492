"""The real SGLang in this process with the plugin's hooks in place, for tests that need no server."""

import logging
from collections.abc import Iterator

import pytest
from hpc_sglang import plugin
from hpc_sglang.record import Record, record


@pytest.fixture(scope="session")
def plugged() -> Record:
    """The process's record after the plugin registered, as SGLang has it do first thing in every process."""
    import sglang  # noqa: F401

    level = logging.getLogger().level
    plugin.register()
    logging.getLogger().setLevel(level)
    return record


@pytest.fixture
def hooked(plugged: Record) -> Iterator[Record]:
    """``plugged``, and what a test writes into the record is gone after it."""
    entries, said = dict(plugged.entries), set(plugged._said)
    yield plugged
    plugged.entries.clear()
    plugged.entries.update(entries)
    plugged._said.clear()
    plugged._said.update(said)
