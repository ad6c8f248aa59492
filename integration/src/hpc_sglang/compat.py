"""Everything that depends on SGLang's version, and nothing else does.

Supported: 0.5.17 to 0.5.23. For any other version each name is looked for where a supported one keeps it, and
``Missing`` says what was not found; a newer version whose names have not moved therefore works.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import re
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)

# Where things are: the newest version's place first.
LINEAR_BF16_FP32 = (
    "sglang.kernels.ops.gemm.bf16_fp32",  # 0.5.21
    "sglang.kernels.ops.attention.dsv4.gemm",
)
WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
# Methods of WeightUpdater after which weights may be others than before. 0.5.17 has update_weights_from_distributed;
# later ones load a broadcast in steps of their own.
WEIGHT_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)
MODEL_RUNNER = "sglang.srt.model_executor.model_runner"
# Methods of ModelRunner that leave it with weights; the second one where weights arrive later than the model (0.5.23).
MODEL_LOADS = ("load_model", "finalize_startup_weight_load")


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
    """The first of ``paths`` ("package.module:name.attribute", or a module) that exists.

    Raises Missing, naming all of them and the installed version, where none does; ModuleNotFoundError where a module is
    there and something that it imports is not.
    """
    for path in paths:
        module, _, name = path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split(".") if name else ():
                found = getattr(found, part)
        except AttributeError:
            continue
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            continue
        return found
    raise Missing(f"sglang {sglang_version()} has no {' or '.join(paths)}")


def find_module(*names: str) -> str:
    """The first of these module names that the installed SGLang has, found by its file: nothing is imported.

    Raises Missing where there is none.
    """
    package = find("sglang")
    for name in names:
        path = pathlib.Path(package.__path__[0], *name.split(".")[1:])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return name
    raise Missing(f"sglang {sglang_version()} has no module {' or '.join(names)}")


def when_imported(module: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action(module)`` now where ``module`` is imported, else right after its import.

    Hooks wait for the modules that they go to, so that processes that need none of these (a launcher, a detokenizer)
    don't import them: a model runner's module takes seconds. ``action`` must not raise.
    """
    if module in sys.modules:
        action(sys.modules[module])
        return
    _Waiting.actions.setdefault(module, []).append(action)
    if not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds nothing itself; has the loader of a module that is waited for call the actions when it is done."""

    actions: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self or not hasattr(finder, "find_spec") else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is not None and hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for action in self.actions.pop(name, ()):
                    action(module)

            loader.exec_module = exec_module
        return spec


def hook(kind: str, target: str, function: Any, failed: Callable[[str], None]) -> None:
    """Put ``function`` around, before or after ``target`` ("package.module:name" or "package.module:Class.method").

    It happens when the target's module is imported. function's arguments are those of SGLang's own hooks: "around" gets
    (original, *args), "after" (result, *args), "before" (*args); only "around" gives the result. SGLang's registry is
    not used: it applies one set of hooks to a target and ignores later ones, and only logs what fails.

    failed: called with the reason where the target is not there; an exception would come out of an import of SGLang's.
    """
    module_name, _, name = target.partition(":")

    def apply(module: ModuleType) -> None:
        *owners, attribute = name.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        found = getattr(owner, attribute, None)
        if found is None:
            failed(f"sglang {sglang_version()} has no {target}")
            return
        kept = vars(owner).get(attribute)
        is_class_method = isinstance(kept, classmethod)
        original = kept.__func__ if is_class_method else found
        hooked = _hooked(kind, original, function)
        setattr(owner, attribute, classmethod(hooked) if is_class_method else hooked)
        if owner is module:  # modules that have it by "from module import name"
            for other in list(sys.modules.values()):
                for alias, value in list(vars(other).items() if isinstance(other, ModuleType) else ()):
                    if value is original:
                        setattr(other, alias, hooked)

    when_imported(module_name, apply)


def _hooked(kind: str, original: Any, function: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kind == "around":
            return function(original, *args, **kwargs)
        if kind == "before":
            function(*args, **kwargs)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        function(result, *args, **kwargs)
        return result

    return call


def deterministic(runner: Any = None) -> bool:
    """Whether this process serves under --enable-deterministic-inference. runner: not needed, any ModelRunner."""
    return bool(_setting("get_exec", "deterministic.enable_deterministic_inference", False))


def prefill_tokens() -> int:
    """The largest number of tokens of a prefill step, as far as it is known: the chunk, or what a batch may hold."""
    chunk = _setting("get_schedule", "chunked_prefill_size", None)
    if not chunk or chunk < 0:
        chunk = _setting("get_schedule", "max_prefill_tokens", None)
    return int(chunk or 8192)


def _setting(namespace: str, path: str, default: Any) -> Any:
    """A resolved setting of this server; ``default`` where no server is running in this process."""
    try:
        value = find(f"sglang.srt.runtime_context:{namespace}")()
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError, RuntimeError, AssertionError):
        return default
    return value


def runs_experts_by_all_to_all() -> str:
    """The name of the --moe-a2a-backend in use, "" where there is none."""
    backend = find("sglang.srt.layers.moe.utils:get_moe_a2a_backend")()
    return "" if backend.is_none() else str(backend.value)


def register_runner_core(name: str, run: Callable[[Any, Any, Any], Any], failed: Callable[[str], None]) -> None:
    """Give the MoE runner ``name`` a core that calls ``run(dispatch_output, quant_info, runner_config)``.

    Versions before 0.5.19 have no such registry and need none. Happens when SGLang imports its runner. failed: called
    with the reason where another package has given it one.
    """

    def apply(runner: ModuleType) -> None:
        if not hasattr(runner, "register_moe_runner_core"):
            return
        try:
            base = find("sglang.srt.layers.moe.moe_runner.base:DispatchMoeRunnerCore")
            backends = find("sglang.srt.layers.moe.utils:MoeRunnerBackend")

            class Core(base):  # type: ignore[misc]
                """A runner core that calls ``run``."""

                runner_backend = backends(name)

                def run_from_dispatch(self, dispatched: Any, quant_info: Any, runner_config: Any, hooks: Any = None):
                    return run(dispatched, quant_info, runner_config)

            runner.register_moe_runner_core(name, Core)
        except (Missing, ValueError) as error:
            failed(str(error))

    when_imported("sglang.srt.layers.moe.moe_runner.runner", apply)


def hook_methods(kind: str, module: str, owner: str, names: tuple[str, ...], function: Any, failed: Any) -> None:
    """``hook`` for those of a class's methods that this version has; ``failed`` where it has none of them."""

    def apply(loaded: ModuleType) -> None:
        known = [name for name in names if hasattr(getattr(loaded, owner, None), name)]
        if not known:
            failed(f"sglang {sglang_version()} has no {module}:{owner} with {' or '.join(names)}")
        for name in known:
            hook(kind, f"{module}:{owner}.{name}", function, failed)

    when_imported(module, apply)


def two_term_linear() -> bool:
    """Whether the user asked SGLang for its own two-term kernel (SGLANG_OPT_BF16_FP32_GEMM_ALGO=hpc)."""
    return getattr(find(*LINEAR_BF16_FP32), "_linear_bf16_fp32_algo", None) == "hpc"


def first_rank() -> bool:
    """Whether this process is the tensor-parallel rank that speaks for all; True outside a server."""
    return not _setting("get_parallel", "tp_rank", 0)


def moe_runner_backend() -> str:
    """The value of --moe-runner-backend that this process serves with."""
    return str(find("sglang.srt.layers.moe.utils:get_moe_runner_backend")().value)


def experts_take_ids() -> bool:
    """Whether experts are given ids and weights that were chosen before, on every rank the same way."""
    return not runs_experts_by_all_to_all() and moe_runner_backend() in (
        "auto", "triton", "deep_gemm", "cutlass", "hpc_ops",
    )  # fmt: skip


def upstream_hpc() -> bool:
    """Whether the package that SGLang's own hpc_ops functions call (module ``hpc``) is installed."""
    return importlib.util.find_spec("hpc") is not None


# Attention


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


def decode_context_parallel() -> int:
    """Ranks that share one request's KV cache in decode."""
    parallel = find("sglang.srt.runtime_context:get_parallel")()
    for name in ("attn_dcp_size", "dcp_size"):
        if hasattr(parallel, name):
            return getattr(parallel, name)
    return 1
