"""The build's compilers: the supported range is stated, and a CMake error names it outside of it (fault P1)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = """
cmake_minimum_required(VERSION 3.26)
project(probe LANGUAGES CXX)
{before}
find_package(hpc-common CONFIG REQUIRED PATHS "{cmake}" NO_DEFAULT_PATH)
"""


def fake_nvcc(folder: Path, version: str) -> Path:
    """A compiler that says its version and compiles nothing."""
    path = folder / "nvcc"
    path.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {version}, V{version}.99"\n')
    path.chmod(0o755)
    return path


def configure(tmp_path: Path, before: str = "", **environment: str) -> str:
    """What CMake says of a project that asks for hpc-common; it must refuse it."""
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    source = tmp_path / "probe"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(PROJECT.format(before=before, cmake=ROOT / "common/cmake"))
    command = [cmake, "-S", source, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={sys.executable}"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert result.returncode != 0, result.stdout
    return " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize("version", ["12.4", "14.0"])
def test_a_compiler_outside_the_range_is_named_with_the_range(tmp_path: Path, version: str) -> None:
    said = configure(tmp_path, CUDACXX=str(fake_nvcc(tmp_path, version)))
    assert "expected a CUDA compiler from 12.8 to below 14" in said
    assert f"({version})" in said


def test_an_old_system_compiler_is_passed_over_for_the_wheels(tmp_path: Path) -> None:
    fake_nvcc(tmp_path, "12.4")
    path = f"{tmp_path}:{os.environ['PATH']}"
    # Without the wheels in this environment the build stops, and says what it looked for.
    said = configure(tmp_path, before="set(ENV{CUDA_HOME} /nonexistent)", PATH=path, CUDACXX="")
    assert "is 12.4; using the compiler wheels" in said
    assert "nvidia-cuda-nvcc" in said


def test_an_old_host_compiler_is_named(tmp_path: Path) -> None:
    said = configure(tmp_path, before="set(CMAKE_CXX_COMPILER_VERSION 10.2.0)")
    assert "expected g++ 11 or newer, got 10.2.0" in said


def test_the_readme_of_contributors_states_the_range() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "12.8" in text and "GCC 11" in text
