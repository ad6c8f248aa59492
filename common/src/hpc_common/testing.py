"""pytest plugin: the poison helpers as fixtures, and the devices a support table allows as parameters.

Loaded by ``pytest_plugins = ["hpc_common.testing"]`` in a root conftest.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from . import poison
from .capability import Support, lookup


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
