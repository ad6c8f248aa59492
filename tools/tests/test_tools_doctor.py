"""The doctor: where a capability row would run and why not, what is missing, what is broken."""

import importlib
import io
import json
import types
from importlib import metadata

import pytest
from hpc_common.capability import Capability, Support
from hpc_tools import cli, doctor, operators
from hpc_tools.errors import InputError
from rich.console import Console

H200 = Capability("cuda:0", "NVIDIA H200", (9, 0), 132, True, "")
A100 = Capability("cuda:0", "NVIDIA A100", (8, 0), 108, False, "compute capability 8.0; the kernels need 9.0")
WITH, WITHOUT = Support("run", "bf16", cuda=True), Support("run", "fp16", note="comes later")


@pytest.mark.parametrize(
    ("row", "gpus", "gpu", "why_not"),
    [
        (WITH, [H200], True, ""),
        (WITH, [A100, H200], True, ""),
        (WITH, [], False, "no GPU on this machine"),
        (WITH, [A100], False, "cuda:0 (NVIDIA A100): compute capability 8.0; the kernels need 9.0"),
        (WITHOUT, [H200], False, "comes later"),
        (Support("run", "x"), [H200], False, "no GPU kernel yet; CPU tensors run"),
    ],
)
def test_place(row: Support, gpus: list[Capability], gpu: bool, why_not: str) -> None:
    placement = doctor.place("hpc-x", row, gpus)
    assert (placement.cpu, placement.gpu, placement.why_not) == (True, gpu, why_not)


def text(report: dict) -> str:
    console = Console(file=io.StringIO(), width=100)
    doctor.show(report, console)
    return console.file.getvalue()


@pytest.fixture
def fresh():
    """operators.installed() without what it remembered, before and after."""
    operators.installed.cache_clear()
    yield
    operators.installed.cache_clear()


def test_this_environment(fresh: None) -> None:
    report = doctor.examine()
    assert doctor.healthy(report)
    json.dumps(report)
    versions = {package["package"]: package["version"] for package in report["packages"]}
    builds = {package["package"]: package["build"] for package in report["packages"]}
    for name in ("hpc-common", *(package.distribution for package in operators.PACKAGES)):
        assert versions[name] == metadata.version(name)
        assert builds[name]["git"] and builds[name]["compiler"]
    assert {run["package"] for run in report["runs"]} == {package.distribution for package in operators.PACKAGES}
    shown = text(report)
    for word in ("hpc-attention", "hpc-moe", "fused_moe", "router_gemm", report["torch"]):
        assert word in shown


def test_missing_and_broken_packages_are_named(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real_version, real_import = metadata.version, importlib.import_module

    def version(name: str) -> str:
        if name == "hpc-router-gemm":
            raise metadata.PackageNotFoundError(name)
        return real_version(name)

    def import_module(name: str) -> types.ModuleType:
        if name == "hpc_moe._C":
            raise ImportError("undefined symbol: abc\nsecond line")
        return real_import(name)

    monkeypatch.setattr(operators.metadata, "version", version)
    monkeypatch.setattr(operators.importlib, "import_module", import_module)
    attention, router, moe = operators.installed()
    assert attention.usable and not router.usable and not moe.usable
    assert router.missing == "hpc-router-gemm is not installed"
    assert moe.missing == "hpc-moe cannot be imported: ImportError: undefined symbol: abc"
    report = doctor.examine()
    assert not doctor.healthy(report)
    assert {run["package"] for run in report["runs"]} == {"hpc-attention"}
    shown = text(report)
    assert "Not installed: hpc-router-gemm" in shown and "undefined symbol: abc" in shown
    assert "second line" not in shown
    assert operators.builds().keys() == {"hpc-attention"}


def test_only_missing_packages_are_healthy(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tuple(operators.Installed(package, None, {}, "") for package in operators.PACKAGES)
    monkeypatch.setattr(operators, "installed", lambda: entries)
    report = doctor.examine()
    assert doctor.healthy(report) and report["runs"] == []
    assert "Not installed: hpc-attention, hpc-router-gemm, hpc-moe" in text(report)


def test_gpu_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: [A100])
    monkeypatch.setenv("HPC_PDL", "0")
    report = doctor.examine()
    shown = text(report)
    assert "cuda:0: NVIDIA A100, capability 8.0, 108 SMs: not usable: compute capability 8.0" in shown
    assert "HPC_PDL=0 in the environment" in shown


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["hpc", "doctor", "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert {"python", "torch", "driver", "gpus", "packages", "runs"} <= set(json.loads(capsys.readouterr().out))
    monkeypatch.setattr(doctor, "healthy", lambda report: False)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1


def test_sglang(tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang would use, under flags of its own behind "--", and what is wrong with them."""
    config = {"architectures": ["HYV3ForCausalLM"], "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = text(doctor.examine())
    assert "In SGLang" in shown and "attention: not used: --attention-backend hpc is not set" in shown

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hpc", "doctor", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capsys.readouterr()

    model = ("--model-path", str(tmp_path))
    status, out, _ = run("--json", "--", *model)
    assert status == 0 and json.loads(out)["sglang"]["operators"][1] == {
        "operator": "router",
        "used": True,
        "detail": "the gates of HYV3MoEFused, 3 bf16 terms",
    }
    status, out, _ = run("--", *model, "--attention-backend", "hpc")
    assert status == 1 and "would not start" in out and "head_dim" in out
    status, _, error = run("--", *model, "--page-size", "x")
    assert status == 2 and error.startswith("hpc: ") and "--page-size" in error


def test_without_hpc_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "hpc-sglang" else real(name))
    report = doctor.examine()
    assert report["sglang"] is None and "In SGLang" not in text(report) and "Not installed: hpc-sglang" in text(report)
    with pytest.raises(InputError, match="hpc-sglang, which is not installed"):
        doctor.examine(["--page-size", "1"])
