"""The router's kernels on a GPU: every compiled tile, error bounds, promises and the choice of experts."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # tests are imported without their folder on the path
import router_kernel_checks as checks  # noqa: E402

pytestmark = pytest.mark.gpu


def _failures(results: checks.Checks) -> list[str]:
    """What failed, after at least one check ran; a CUDA error is raised here, not in another test."""
    done = list(results)
    torch.cuda.synchronize()
    assert done
    return [f"{name} {facts}" for name, ok, facts in done if not ok]


def test_every_compiled_tile_and_cluster() -> None:
    assert _failures(checks.every_kernel()) == []


def test_errors_of_chosen_configs() -> None:
    assert _failures(checks.values()) == []


def test_bounds_fail_for_wrong_terms() -> None:
    assert _failures(checks.planted_faults()) == []


def test_promises() -> None:
    assert _failures(checks.promises()) == []


def test_equal_rows_at_every_m() -> None:
    assert _failures(checks.equal_rows_at_every_m()) == []


def test_choice_of_experts() -> None:
    assert _failures(checks.route()) == []
