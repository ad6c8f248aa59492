"""``hpc doctor``: what this machine and this environment have, and which operator would run where and why not."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from hpc_common.capability import Capability, Support, capability
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import operators, tables
from .errors import InputError

SWITCHES = ("HPC_PDL", "HPC_DEBUG", "HPC_SGLANG_ROUTER", "HPC_SGLANG_ROUTER_TERMS")


def _driver() -> str | None:
    """The NVIDIA driver's version as nvidia-smi says it, None where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _gpus() -> list[Capability]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [capability(f"cuda:{index}") for index in range(count)]


@dataclass(frozen=True)
class Placement:
    """Where one row of a capability table would run here. gpu: on one of this machine's GPUs; why_not: why none."""

    package: str
    operator: str
    feature: str
    cpu: bool
    gpu: bool
    why_not: str


def place(package: str, row: Support, gpus: list[Capability]) -> Placement:
    """Where ``row`` would run on a machine with these GPUs."""
    usable = [gpu for gpu in gpus if gpu.usable]
    if not row.cuda:
        why_not = row.note or "no GPU kernel yet; CPU tensors run"
    elif not gpus:
        why_not = "no GPU on this machine"
    elif not usable:
        why_not = "; ".join(f"{gpu.device} ({gpu.name}): {gpu.reason}" for gpu in gpus)
    else:
        why_not = ""
    return Placement(package, row.operator, row.feature, row.cpu, not why_not, why_not)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _common_build() -> dict[str, Any]:
    try:
        from hpc_common import _core
    except ImportError as error:
        return {"error": f"ImportError: {str(error).splitlines()[0]}"}
    return dict(_core.build_info())


def _sglang(flags: Sequence[str]) -> dict[str, Any] | None:
    """What SGLang would use under these flags of its own; None without hpc-sglang, the error where it is broken."""
    if _version("hpc-sglang") is None:
        if flags:
            raise InputError("SGLang's flags need hpc-sglang, which is not installed")
        return None
    try:
        from hpc_sglang.examine import examine as examine_sglang
        from hpc_sglang.model import BadInput
    except ImportError as error:
        return {"error": f"ImportError: {str(error).splitlines()[0]}"}
    try:
        report = examine_sglang(flags)
    except BadInput as error:
        raise InputError(str(error)) from None
    return {
        "versions": report.versions,
        "device": report.device,
        "model": report.model,
        "operators": [vars(entry) for entry in report.entries],
        "refused": report.refused,
        "lines": report.lines(),
    }


def examine(flags: Sequence[str] = ()) -> dict[str, Any]:
    """Everything the doctor knows, ready for JSON. flags: SGLang's, to say what it would use. Raises InputError."""
    gpus = _gpus()
    placements = [
        place(entry.package.distribution, row, gpus)
        for entry in operators.installed()
        if entry.usable
        for row in operators.support_rows(entry)
    ]
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver": _driver(),
        "gpus": [vars(gpu) for gpu in gpus],
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "packages": [
            {"package": "hpc-common", "version": _version("hpc-common"), "build": _common_build(), "error": ""},
            *(
                {
                    "package": entry.package.distribution,
                    "version": entry.version,
                    "build": entry.build,
                    "error": entry.error,
                }
                for entry in operators.installed()
            ),
            {"package": "hpc-sglang", "version": _version("hpc-sglang"), "build": {}, "error": ""},
            {"package": "hpc-tools", "version": _version("hpc-tools"), "build": {}, "error": ""},
        ],
        "runs": [vars(placement) for placement in placements],
        "sglang": _sglang(flags),
    }


def healthy(report: dict[str, Any]) -> bool:
    """Whether everything installed can be imported."""
    if "error" in (report["sglang"] or {}):
        return False
    return not any(package["error"] or package["build"].get("error") for package in report["packages"])


def _machine_lines(report: dict[str, Any]) -> list[str]:
    cuda = f"built with CUDA {report['torch_cuda']}" if report["torch_cuda"] else "without CUDA"
    lines = [
        f"Python {report['python']} on {report['machine']}, torch {report['torch']} ({cuda})",
        f"NVIDIA driver {report['driver']}" if report["driver"] else "no NVIDIA driver found",
    ]
    for gpu in report["gpus"]:
        major, minor = gpu["compute"]
        verdict = "usable" if gpu["usable"] else f"not usable: {gpu['reason']}"
        lines.append(f"{gpu['device']}: {gpu['name']}, capability {major}.{minor}, {gpu['num_sms']} SMs: {verdict}")
    if not report["gpus"]:
        lines.append("no GPU visible to torch: everything runs on the CPU")
    lines += [f"{name}={value} in the environment" for name, value in report["switches"].items()]
    return lines


def _package_table(report: dict[str, Any]) -> Table:
    table = tables.plain("Installed")
    for name in ("package", "version", "built from", "compiler", "CUDA"):
        table.add_column(name)
    for package in report["packages"]:
        build, error = package["build"], package["error"] or package["build"].get("error", "")
        if package["version"] is None:
            table.add_row(package["package"], "[yellow]none[/yellow]")
        elif error:
            table.add_row(package["package"], package["version"], f"[red]{escape(error)}[/red]")
        else:
            cells = [str(build.get(key, "")) for key in ("git", "compiler", "cuda")]
            table.add_row(package["package"], package["version"], *cells)
    return table


def _run_table(report: dict[str, Any]) -> Table:
    """What runs here; what of an operator has the same answer is one row."""
    groups: dict[tuple[str, str, bool, bool, str], list[str]] = {}
    for run in report["runs"]:
        key = (run["package"], run["operator"], run["cpu"], run["gpu"], run["why_not"])
        groups.setdefault(key, []).append(run["feature"])
    table = tables.plain("What runs here")
    for name in ("operator", "CPU", "GPU", "what of it", "why not"):
        table.add_column(name)
    for (_, operator, cpu, gpu, why_not), features in groups.items():
        marks = ["[green]yes[/green]" if runs else "[yellow]no[/yellow]" for runs in (cpu, gpu)]
        table.add_row(operator, *marks, escape("; ".join(features)), escape(why_not), end_section=True)
    return table


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report for people."""
    for line in _machine_lines(report):
        console.print(line, highlight=False)
    console.print()
    console.print(_package_table(report))
    if report["runs"]:
        console.print()
        console.print(_run_table(report))
    sglang = report["sglang"]
    if sglang is not None:
        console.print("\n[bold]In SGLang[/bold]")
        for line in [sglang["error"]] if "error" in sglang else sglang["lines"]:
            console.print(escape(line), highlight=False)
        if sglang.get("refused"):
            console.print("[red]A server with these flags would not start.[/red]")
    missing = [package["package"] for package in report["packages"] if package["version"] is None]
    if missing:
        console.print(f"\nNot installed: {', '.join(missing)}. Add one with: pip install NAME", highlight=False)
    if not healthy(report):
        console.print("\n[red]An installed package cannot be imported; reinstall it.[/red]")
