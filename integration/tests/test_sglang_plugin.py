"""The plugin's record of every operator, its isolation of them and its entry point. SGLang itself is not needed."""

import pathlib
import re
import subprocess
import sys
import tomllib
import types
from importlib import metadata

import pytest
from hpc_sglang import plugin
from hpc_sglang.record import ATTENTION, MOE, ROUTER, Record

ROOT = pathlib.Path(__file__).parents[1]


def versions(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(plugin.metadata, "version", version)


def parts(monkeypatch: pytest.MonkeyPatch, **modules) -> None:
    """Stand-ins for the modules that plug the operators in, name -> register(record); no check of flags."""
    monkeypatch.setattr(plugin.flags, "register", lambda record: None)
    for name, register in modules.items():
        module = types.ModuleType(f"hpc_sglang.{name}")
        module.register = register
        monkeypatch.setitem(sys.modules, module.__name__, module)


ALL = {"hpc-attention": "0.1.3", "hpc-router-gemm": "0.1.0", "hpc-moe": "0.1.0"}


def test_each_operator_by_itself(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that raises leaves its reason in the record and the others where they were."""

    def broken(record: Record) -> None:
        raise RuntimeError("no such hook\nsecond line")

    versions(monkeypatch, ALL)
    parts(
        monkeypatch,
        attention=broken,
        router=lambda record: record.used(ROUTER, "everywhere"),
        moe=lambda record: record.not_used(MOE, "no GPU"),
    )
    record = Record()
    monkeypatch.setattr(plugin, "record", record)
    plugin.register()
    assert record.lines() == [
        "attention: not used: registering it failed: RuntimeError: no such hook",
        "router: used: everywhere",
        "moe: not used: no GPU",
    ]
    assert record.reason(MOE) == "no GPU" and record.reason(ROUTER) == ""
    assert "registering attention failed" in caplog.text and "second line" in caplog.text


def test_a_missing_operator_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, {"hpc-attention": "0.1.3", "hpc-moe": "0.2.0"})
    asked = []
    parts(monkeypatch, attention=asked.append, router=asked.append, moe=asked.append)
    record = Record()
    monkeypatch.setattr(plugin, "record", record)
    plugin.register()
    assert asked == [record]
    assert record.reason(ROUTER) == "not installed (pip install hpc-router-gemm)"
    assert "hpc-moe 0.2.0 is installed" in record.reason(MOE) and "from 0.1 up to, not including, 0.2" in record.reason(
        MOE
    )


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
    assert (plugin.why_not_installed(plugin.OPERATORS[0]) == "") is works


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


def test_importing_the_plugin_is_light() -> None:
    code = (
        "import sys, hpc_sglang.plugin;"
        "print([m for m in ('torch', 'sglang', 'hpc_attention', 'hpc_router_gemm', 'hpc_moe') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lines_wait_for_the_loggers(caplog: pytest.LogCaptureFixture) -> None:
    record = Record()
    with caplog.at_level("INFO", logger="hpc_sglang"):
        record.not_used(ATTENTION, "first")
        record.used(ATTENTION, "a")
        assert not caplog.messages
        record.announce()
        assert caplog.messages == ["hpc-sglang: attention: used: a"]
        record.used(ATTENTION, "a")
        record.not_used(MOE, "b")
        record.quiet = True
        record.not_used(ROUTER, "c")
    assert caplog.messages == ["hpc-sglang: attention: used: a", "hpc-sglang: moe: not used: b"]
    with pytest.raises(ValueError, match="operator: expected one of"):
        record.used("fifth", "")
