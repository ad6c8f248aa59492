"""What holds between the packages: arrows of imports, versions, sizes of files, one skeleton."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = {"hpc-attention": "hpc_attention", "hpc-router-gemm": "hpc_router_gemm", "hpc-moe": "hpc_moe"}
PACKAGES = {
    "hpc-common": ROOT / "common",
    **{name: ROOT / "packages" / name for name in OPERATORS},
    "hpc-sglang": ROOT / "integration",
    "hpc-tools": ROOT / "tools",
}
MODULES = {name: name.replace("-", "_") for name in PACKAGES}
# A package may import these of the workspace, and no others.
MAY_IMPORT = {
    "hpc-common": set(),
    **{name: {"hpc_common"} for name in OPERATORS},
    "hpc-sglang": {"hpc_common", *OPERATORS.values()},
    "hpc-tools": {"hpc_common", "hpc_sglang", *OPERATORS.values()},
}


def project(package: str) -> dict:
    return tomllib.loads((PACKAGES[package] / "pyproject.toml").read_text())["project"]


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    ours = set(MODULES.values())
    for path in (PACKAGES[package] / "src").rglob("*.py"):
        foreign = imported_modules(path) & ours - {MODULES[package]} - MAY_IMPORT[package]
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_changelog_starts_with_the_version(package: str) -> None:
    headings = re.findall(r"^## (\S+)", (PACKAGES[package] / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings and headings[0] == project(package)["version"]


@pytest.mark.parametrize("package", OPERATORS)
def test_operators_require_one_minor_of_common(package: str) -> None:
    minor = ".".join(project("hpc-common")["version"].split(".")[:2])
    assert f"hpc-common~={minor}.0" in project(package)["dependencies"]
    build = tomllib.loads((PACKAGES[package] / "pyproject.toml").read_text())["build-system"]["requires"]
    assert f"hpc-common~={minor}.0" in build


@pytest.mark.parametrize("package", OPERATORS)
def test_operators_share_one_skeleton(package: str) -> None:
    base = PACKAGES[package]
    wanted = ["README.md", "CHANGELOG.md", "DESIGN.md", "CMakeLists.txt", "csrc/api", "tests", "benchmarks"]
    wanted += [f"src/{OPERATORS[package]}/{name}" for name in ("__init__.py", "support.py", "_checks.py", "py.typed")]
    missing = [name for name in wanted if not (base / name).exists()]
    assert not missing


def test_common_imports_without_torch() -> None:
    """hpc-common is a build requirement, and a build environment has no torch."""
    code = "import sys, hpc_common; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_are_short() -> None:
    limits = {".py": 400, ".cpp": 400, ".hpp": 400, ".cu": 600, ".cuh": 600}
    long = []
    for base in PACKAGES.values():
        for path in base.rglob("*"):
            if path.suffix in limits and "build" not in path.relative_to(base).parts:
                lines = len(path.read_text().splitlines())
                if lines > limits[path.suffix]:
                    long.append(f"{path.relative_to(ROOT)}: {lines} lines, limit {limits[path.suffix]}")
    assert not long
