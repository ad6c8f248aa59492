"""The plugin's record of every operator, its log lines and its entry point. SGLang itself is not needed."""

import logging
import pathlib
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from hpc_sglang import plugin

ROOT = pathlib.Path(__file__).parents[1]


def versions(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(plugin.metadata, "version", version)


def test_one_line_for_each_operator(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    versions(monkeypatch, {"hpc-attention": "0.1.3", "hpc-moe": "0.2.0"})
    with caplog.at_level(logging.INFO, logger="hpc_sglang"):
        record = plugin.register()
    assert [entry.distribution for entry in record] == ["hpc-attention", "hpc-router-gemm", "hpc-moe"]
    assert not any(entry.registered for entry in record)
    assert caplog.messages == [f"hpc-sglang: {entry.line()}" for entry in record]
    attention, router, moe = (entry.line() for entry in record)
    assert attention == f"attention (hpc-attention 0.1.3): not registered: {plugin.NOT_YET}"
    assert "not installed (pip install hpc-router-gemm)" in router
    assert "hpc-moe 0.2.0" in moe and "from 0.1 up to, not including, 0.2" in moe


@pytest.mark.parametrize(
    ("version", "works"),
    [
        ("0.1.0", True),
        ("0.1.99", True),
        ("0.1.0rc1", True),
        ("0.0.9", False),
        ("0.2.0", False),
        ("1.1.0", False),
        ("odd", False),
    ],
)
def test_version_range(monkeypatch: pytest.MonkeyPatch, version: str, works: bool) -> None:
    versions(monkeypatch, {"hpc-attention": version})
    reason = plugin.registrations()[0].reason
    assert (reason == plugin.NOT_YET) is works


def test_ranges_equal_those_of_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = dict(
        re.fullmatch(r"(hpc-[a-z-]+)~=(\d+\.\d+)\.\d+", need).groups()
        for needs in project["optional-dependencies"].values()
        for need in needs
    )
    assert set(stated) == {operator.distribution for operator in plugin.OPERATORS}
    for operator in plugin.OPERATORS:
        (major, minor), end = operator.works_with
        assert stated[operator.distribution] == f"{major}.{minor}"  # ~=0.1.0 means 0.1.*
        assert end == (major, minor + 1)


def test_entry_point_is_registered_and_loads() -> None:
    entries = [entry for entry in metadata.entry_points(group="sglang.srt.plugins") if entry.dist.name == "hpc-sglang"]
    assert [entry.name for entry in entries] == ["hpc"]
    assert entries[0].load() is plugin.register


def test_plugin_imports_neither_torch_nor_an_operator() -> None:
    code = (
        "import sys, hpc_sglang.plugin as p; p.register();"
        "print([m for m in ('torch', 'hpc_attention', 'hpc_router_gemm', 'hpc_moe', 'hpc_common') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_module_prints_the_record() -> None:
    done = subprocess.run([sys.executable, "-m", "hpc_sglang"], capture_output=True, text=True, check=True)
    head, *lines = done.stdout.splitlines()
    assert head == f"hpc-sglang {metadata.version('hpc-sglang')}"
    assert lines == [entry.line() for entry in plugin.registrations()]
