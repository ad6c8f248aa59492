"""The real SGLang in this process with the plugin's hooks in place, for tests that need no server."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from hpc_sglang import plugin
from hpc_sglang.record import Record, record


def pytest_collection_finish(session: pytest.Session) -> None:
    """Engines that the session's tests ask for run from now on, beside the tests before theirs."""
    marked = [(item, mark.args[0]) for item in session.items if (mark := item.get_closest_marker("engine"))]
    if marked and not session.config.option.collectonly:
        ahead = marked[0][0].module.ahead
        session.config.add_cleanup(ahead.stop)
        ahead.start([name for _, name in marked])


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


@pytest.fixture
def interpreted() -> Callable[[str], None]:
    """Runs a program that ends by printing "checked", with this folder as its argument, in Triton's interpreter."""

    def run(program: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", program, os.path.dirname(__file__)], capture_output=True, text=True,
            env={**os.environ, "TRITON_INTERPRET": "1"},
        )  # fmt: skip
        assert done.returncode == 0 and done.stdout.strip() == "checked", done.stderr

    return run
