"""Everything that depends on SGLang's version, and nothing else does.

Supported: 0.5.17 to 0.5.23. For any other version each name is looked for where the nearest supported one keeps it, and
``Missing`` says what was not found; a newer version whose names have not moved therefore works.
"""

import importlib
import re
from importlib import metadata
from typing import Any

OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)


class Missing(ImportError):
    """Something that this package needs is not in the installed SGLang."""


def sglang_version() -> str | None:
    """The installed SGLang's version, None where there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.5.23.post1" is (0, 5, 23)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def version_note() -> str:
    """ "" for a supported SGLang, else a few words on how it differs."""
    version = sglang_version()
    if version is None:
        return "sglang is not installed"
    if OLDEST <= version_tuple(version)[:3] <= NEWEST:
        return ""
    supported = " to ".join(".".join(map(str, end)) for end in (OLDEST, NEWEST))
    return f"sglang {version} is not one of the versions this was tested with, {supported}"


def find(*paths: str) -> Any:
    """The first of ``paths`` ("package.module:name.attribute") that exists.

    Raises Missing, naming all of them and the installed version, where none does.
    """
    for path in paths:
        module, _, name = path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split(".") if name else ():
                found = getattr(found, part)
        except (ModuleNotFoundError, AttributeError):
            continue
        return found
    raise Missing(f"sglang {sglang_version()} has no {' or '.join(paths)}")


def hook(kind: str, target: str, function: Any) -> None:
    """Hook ``function`` on ``target`` ("package.module.Class.method"); kind: before, after, around or replace.

    SGLang applies hooks once every plugin has run. Raises Missing where SGLang has no hook registry.
    """
    registry = find("sglang.srt.plugins.hook_registry:HookRegistry")
    kinds = find("sglang.srt.plugins.hook_registry:HookType")
    registry.register(target, function, kinds(kind))
