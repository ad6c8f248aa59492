"""The operator packages as the tools see them: which are installed, in which version and build, and what they support.

Tools import an operator only where it is installed; everything else in this package asks here first.
"""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any

from hpc_common.capability import Support


@dataclass(frozen=True)
class Package:
    """An operator package. title: what it does, in a word or two."""

    title: str
    distribution: str
    module: str


PACKAGES = (
    Package("attention", "hpc-attention", "hpc_attention"),
    Package("router GEMM", "hpc-router-gemm", "hpc_router_gemm"),
    Package("fused MoE", "hpc-moe", "hpc_moe"),
)


@dataclass(frozen=True)
class Installed:
    """What is there of a package.

    version: None where it is not installed. build: its extension's ``build_info()`` (git, compiler, cuda). error: why
    an installed package cannot be imported, in one line, or "".
    """

    package: Package
    version: str | None
    build: dict[str, Any]
    error: str

    @property
    def usable(self) -> bool:
        return self.version is not None and not self.error

    @property
    def missing(self) -> str:
        """Why it cannot be used, in one line; "" where it can."""
        if self.version is None:
            return f"{self.package.distribution} is not installed"
        return f"{self.package.distribution} cannot be imported: {self.error}" if self.error else ""

    def load(self, submodule: str = "") -> ModuleType:
        """The package's module, or a submodule of it."""
        return importlib.import_module(self.package.module + (f".{submodule}" if submodule else ""))


def _inspect(package: Package) -> Installed:
    try:
        version = metadata.version(package.distribution)
    except metadata.PackageNotFoundError:
        return Installed(package, None, {}, "")
    try:
        importlib.import_module(package.module)
        build = dict(importlib.import_module(f"{package.module}._C").build_info())
    except Exception as error:  # a broken extension can raise anything; the doctor's task is to say what
        text = str(error).strip().splitlines()
        return Installed(package, version, {}, f"{type(error).__name__}: {text[0] if text else ''}")
    return Installed(package, version, build, "")


@cache
def installed() -> tuple[Installed, ...]:
    """Every operator package in a fixed order, imported where that is possible."""
    return tuple(_inspect(package) for package in PACKAGES)


def find(module: str) -> Installed:
    """The entry of the package whose module is ``module``; KeyError for a name that is none."""
    for entry in installed():
        if entry.package.module == module:
            return entry
    raise KeyError(module)


def support_rows(entry: Installed) -> Iterable[Support]:
    """The capability table of a usable package."""
    return entry.load("support").SUPPORT


def builds() -> dict[str, Any]:
    """Version and build of every usable operator, for results files."""
    return {
        entry.package.distribution: {"version": entry.version, **entry.build} for entry in installed() if entry.usable
    }
