"""Wheels and devices: size budgets that hold (fault P3) and nothing kept for one device alone (fault P5)."""

import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hpc_common import capability as capability_module
from hpc_common.capability import capability

ROOT = Path(__file__).resolve().parent.parent
CHECK = ROOT / ".ci/check_wheel.py"
OPERATORS = ("hpc_attention", "hpc_router_gemm", "hpc_moe")


def check_wheel(path: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, CHECK, path], capture_output=True, text=True)


def wheel(path: Path, name: str, entry: str, size: int) -> Path:
    path = path / f"{name}-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(entry, b"\0" * size)
    return path


def test_a_wheel_over_its_budget_or_with_foreign_files_is_refused(tmp_path: Path) -> None:
    assert check_wheel(wheel(tmp_path, "hpc_tools", "hpc_tools/cli.py", 1000)).returncode == 0
    over = check_wheel(wheel(tmp_path, "hpc_tools", "hpc_tools/cli.py", 3 << 20))
    assert over.returncode == 1 and "OVER its budget" in over.stdout
    foreign = check_wheel(wheel(tmp_path, "hpc_moe", "hpc_moe/libcudart.so.13", 10))
    assert foreign.returncode == 1 and "HOLDS" in foreign.stdout


@pytest.mark.parametrize("module", OPERATORS)
def test_the_extension_needs_no_torch_and_no_cuda_library(module: str) -> None:
    """Static cudart, no libtorch, no libcuda: the wheel works with every torch."""
    extension = Path(importlib.import_module(f"{module}._C").__file__)
    names = re.findall(rb"lib[a-z0-9_]+\.so[.0-9]*", extension.read_bytes())
    needed = {name.decode() for name in names}
    assert not {name for name in needed if name.startswith(("libtorch", "libc10", "libcudart.so"))}


def test_properties_are_kept_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may hold GPUs of several kinds; the second is asked itself."""
    gpus = [
        SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132),
        SimpleNamespace(name="NVIDIA H20", major=9, minor=0, multi_processor_count=78),
        SimpleNamespace(name="NVIDIA A100", major=8, minor=0, multi_processor_count=108),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    capability_module._gpu.cache_clear()
    try:
        assert [capability(f"cuda:{index}").num_sms for index in range(3)] == [132, 78, 108]
        assert [capability(f"cuda:{index}").usable for index in range(3)] == [True, True, False]
        assert "8.0" in capability("cuda:2").reason and "9.0" in capability("cuda:2").reason
        with pytest.raises(ValueError, match="one of 3 visible GPUs"):
            capability("cuda:3")
    finally:
        capability_module._gpu.cache_clear()


@pytest.mark.parametrize("module", (*OPERATORS, "hpc_common", "hpc_sglang"))
def test_no_source_names_a_device_by_number(module: str) -> None:
    """Workspaces go to the tensor's device; nothing asks device 0."""
    folder = Path(importlib.import_module(module).__file__).parent
    found = [
        f"{path.name}:{number}"
        for path in folder.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"""["']cuda:0["']|get_device_properties\(0\)|device\("cuda"\)""", line)
    ]
    assert not found
