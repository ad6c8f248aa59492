"""pytest plugin: the poison helpers as fixtures, and the devices a support table allows as parameters.

Loaded by ``pytest_plugins = ["hpc_common.testing"]`` in a root conftest. Also scripts as modules (those of benchmarks/
are on no import path), and what every package's figures.py is held to.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from . import poison
from .capability import Support, lookup
from .generated import RESULTS_END


def device_params(table: Iterable[Support], operator: str, *features: str) -> list[Any]:
    """Parameters for a test's ``device``: "cpu", and "cuda" (marked ``gpu``) once the support table says it runs.

    Args:
        table: an operator's support rows. operator: the public function. features: rows that all must run there.

    The kernel's author flips the row, and every value test written for the CPU is collected for the GPU too.
    """
    table = list(table)
    rows = [lookup(table, operator, feature) for feature in features]
    params: list[Any] = []
    if all(row.cpu for row in rows):
        params.append("cpu")
    if all(row.cuda for row in rows):
        params.append(pytest.param("cuda", marks=pytest.mark.gpu))
    return params


@pytest.fixture
def canary() -> Iterator[Callable[..., torch.Tensor]]:
    """``canary(shape, dtype=torch.uint8, device="cpu")``: a tensor between guards, checked when the test ends."""
    made: list[poison.Canary] = []

    def make(shape: Any, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu") -> torch.Tensor:
        made.append(poison.Canary(shape, dtype, device))
        return made[-1].tensor

    yield make
    for buffer in made:
        buffer.check()


@pytest.fixture
def dirty() -> Callable[..., torch.Tensor]:
    """``dirty(tensor, seed=0)``: fill a dense workspace with random bytes in place."""
    return poison.dirty_


@pytest.fixture
def paged_cache() -> Callable[..., poison.PagedCache]:
    """``hpc_common.poison.paged_cache``: dense keys and values to a poisoned paged cache."""
    return poison.paged_cache


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread during a test of many small operations; the old number afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load_script(path: Path, name: str) -> ModuleType:
    """A Python file as the module ``name``, made anew and entered in sys.modules (its dataclasses look there)."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_figures(figures: ModuleType, change: Callable[[list[dict[str, Any]]], None], changed: list[str]) -> None:
    """What a figures.py (see ``hpc_common.generated``) is held to.

    Its files are those of the committed results; rows after ``change`` make others of the files named ``changed``, and
    no more; a README without both markers is refused.
    """
    assert figures.main(["--check"]) == 0
    document = json.loads(figures.RESULTS.read_text())
    readme = figures.README.read_text()
    before = figures.outputs(document, readme)
    change(document["rows"])
    after = figures.outputs(document, readme)
    assert [path.name for path in before if before[path] != after[path]] == changed
    with pytest.raises(ValueError, match="once each"):
        figures.outputs(document, readme.replace(RESULTS_END, ""))
