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


def attention_choices() -> list[list[str]]:
    """The lists of attention backend names that SGLang's flags accept: any, and those of deterministic inference."""
    homes = ("sglang.srt.arg_groups.choices", "sglang.srt.server_args")
    names = (
        "ATTENTION_BACKEND_CHOICES",
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
    )
    return [find(*(f"{home}:{name}" for home in homes)) for name in names]


def attention_backends(runner: Any) -> tuple[str | None, str | None]:
    """The names of the (prefill, decode) attention backends that the flags ask for."""
    try:
        return find("sglang.srt.runtime_context:attention_backends")()
    except Missing:
        return runner.server_args.get_attention_backends()


def attention_layers(runner: Any) -> list[Any]:
    """The RadixAttention layers of a runner's model."""
    kind = find("sglang.srt.layers.radix_attention:RadixAttention")
    return [module for module in runner.model.modules() if isinstance(module, kind)]


def window_pool(runner: Any) -> Any:
    """The hybrid KV pool whose layers with a window have slots of their own; None for every other pool."""
    pool = runner.token_to_kv_pool
    return pool if isinstance(pool, find("sglang.srt.mem_cache.swa_memory_pool:SWAKVPool")) else None


def speculative(runner: Any) -> tuple[str | None, int, int]:
    """(algorithm, topk, rows a request in verification); (None, 0, 1) without speculative decoding."""
    spec = find("sglang.srt.runtime_context:get_spec")()
    if spec.speculative_algorithm is None:
        return None, 0, 1
    return spec.speculative_algorithm, spec.speculative_eagle_topk or 0, spec.speculative_num_draft_tokens or 1


def deterministic(runner: Any) -> bool:
    """Whether the server runs with --enable-deterministic-inference."""
    kernels = find("sglang.srt.runtime_context:get_exec")()
    group = getattr(kernels, "deterministic", None)
    source = runner.server_args if group is None else group
    return bool(source.enable_deterministic_inference)


def decode_context_parallel() -> int:
    """Ranks that share one request's KV cache in decode."""
    parallel = find("sglang.srt.runtime_context:get_parallel")()
    for name in ("attn_dcp_size", "dcp_size"):
        if hasattr(parallel, name):
            return getattr(parallel, name)
    return 1
