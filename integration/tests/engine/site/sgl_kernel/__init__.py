"""Stands in for sglang-kernel, whose wheel needs a GPU: every name exists, calling one raises.

SGLang's CPU engine imports many of them and calls none in the models that are tested here.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, NoReturn


class Absent:
    """A name of sgl_kernel: attributes are as absent, a call says which function was wanted."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is not in the tests' stand-in for sglang-kernel")

    def __getattr__(self, name: str) -> "Absent":
        return absent(self._name, name)


def absent(parent: str, name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"{parent}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of sgl_kernel."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: absent(module.__name__, name)  # type: ignore[method-assign]


def __getattr__(name: str) -> Absent:
    return absent("sgl_kernel", name)


sys.meta_path.append(Finder())
