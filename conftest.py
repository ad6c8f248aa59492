"""What every test of the workspace shares: GPU tests that skip, in one line, without a Hopper GPU; hypothesis profiles.

Profiles: ``dev`` (25 examples, the default), ``ci`` (200), ``nightly`` (5,000); choose with HYPOTHESIS_PROFILE.
"""

import os
from functools import cache

import pytest
import torch
from hpc_common.capability import capability
from hypothesis import HealthCheck, settings

pytest_plugins = ["hpc_common.testing"]

for profile, examples in (("dev", 25), ("ci", 200), ("nightly", 5000)):
    settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        derandomize=profile != "nightly",
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@cache
def no_hopper() -> str:
    """Why GPU tests cannot run here; "" where they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    machine = capability()
    return "" if machine.usable else f"{machine.name}: {machine.reason}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and no_hopper():
        pytest.skip(f"needs a Hopper GPU (sm_90a): {no_hopper()}")
