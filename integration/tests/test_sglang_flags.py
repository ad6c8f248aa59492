"""Flags that ask for what can't be had end the start with the reason; what isn't asked for is said not to be used."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hpc_sglang import compat, flags
from hpc_sglang.flags import FlagHooks
from hpc_sglang.record import ATTENTION, MOE, ROUTER, Record


def arguments(**changes: Any) -> SimpleNamespace:
    names = (*flags.ATTENTION_FLAGS, *flags.MOE_FLAGS)
    return SimpleNamespace(**{**dict.fromkeys(names), "moe_runner_backend": "auto", **changes})


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own kernels are not installed."""
    monkeypatch.setattr(compat, "upstream_hpc", lambda: False)


@pytest.fixture
def nothing() -> Record:
    """A record of an environment where nothing can be used."""
    record = Record()
    record.not_used(ATTENTION, "not installed (pip install hpc-attention)")
    record.not_used(ROUTER, "not installed")
    record.not_used(MOE, "compute capability 8.0")
    return record


@pytest.mark.parametrize("flag", flags.ATTENTION_FLAGS)
def test_attention_is_refused_with_flag_and_reason(flag: str, nothing: Record) -> None:
    with pytest.raises(ValueError) as refusal:
        FlagHooks(nothing).check(arguments(**{flag: "hpc"}))
    written = flag.replace("_", "-")
    assert str(refusal.value) == f"hpc-sglang: --{written} hpc: not installed (pip install hpc-attention)"


@pytest.mark.parametrize("flag", flags.MOE_FLAGS)
def test_moe_is_refused_with_flag_and_reason(flag: str, nothing: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} hpc_ops: compute capability 8.0"):
        FlagHooks(nothing).check(arguments(**{flag: "hpc_ops"}))
    monkeypatch.setattr(compat, "upstream_hpc", lambda: True)  # then the name means SGLang's own function
    FlagHooks(nothing).check(arguments(**{flag: "hpc_ops"}))


def test_what_is_not_asked_for_or_is_there_is_not_refused(nothing: Record) -> None:
    FlagHooks(nothing).check(arguments(attention_backend="triton"))
    nothing.used(ATTENTION, "")
    nothing.used(MOE, "")
    FlagHooks(nothing).check(arguments(attention_backend="hpc", moe_runner_backend="hpc_ops"))


def test_layers_share_a_workspace() -> None:
    record = Record()
    record.used(MOE, "")
    with pytest.raises(ValueError, match="--moe-runner-backend hpc_ops: prefill and decode at the same time"):
        FlagHooks(record).check(arguments(moe_runner_backend="hpc_ops", enable_pdmux=True))
    FlagHooks(record).check(arguments(enable_pdmux=True))


def test_every_refusal_is_said(nothing: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_SGLANG_ROUTER_TERMS", "two")
    found = flags.refusals(arguments(decode_attention_backend="hpc", moe_runner_backend="hpc_ops"), nothing)
    assert found == [
        "--decode-attention-backend hpc: not installed (pip install hpc-attention)",
        "--moe-runner-backend hpc_ops: compute capability 8.0",
        "HPC_SGLANG_ROUTER_TERMS: expected 1, 2 or 3, got 'two'",
    ]


def test_the_launcher_checks(hooked: Record) -> None:
    """In SGLang's own check of its arguments, before anything of it."""
    from sglang.srt.server_args import ServerArgs

    hooked.not_used(ATTENTION, "not installed")
    with pytest.raises(ValueError, match="hpc-sglang: --attention-backend hpc: not installed"):
        ServerArgs.check_server_args(arguments(attention_backend="hpc"))


def test_the_name_reaches_the_check(nothing: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention is not registered the parser still takes its name, so that the reason is said."""
    choices = ["triton"]
    monkeypatch.setattr(compat, "attention_choices", lambda: [choices])
    monkeypatch.setattr(compat, "hook", lambda *args: None)
    for _ in range(2):
        flags.register(nothing)
    assert choices == ["triton", "hpc"]


def load(hooks: FlagHooks, **changes: Any) -> Any:
    """ModelRunner.load_model of a runner with these flags, which leaves a note."""

    def original(runner: Any, result: str) -> str:
        hooks.record.note("from the loader")
        return result

    return hooks.load(original, runner(**changes), "loaded")


def runner(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(server_args=arguments(**changes))


def test_lines_of_a_scheduler(
    plugged: Record, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line an operator after the first model is loaded, none from other ranks, nothing twice for a draft model."""
    record = Record()
    for operator in (ATTENTION, ROUTER, MOE):
        record.used(operator, "registered")
    with caplog.at_level(logging.INFO, logger="hpc_sglang"):
        hooks = FlagHooks(record)
        load(hooks)
        assert caplog.messages == [
            "hpc-sglang: from the loader",
            "hpc-sglang: attention: not used: --attention-backend hpc is not set",
            "hpc-sglang: router: used: registered",
            "hpc-sglang: moe: not used: --moe-runner-backend hpc_ops is not set",
        ]
        load(hooks)
        assert len(caplog.messages) == 4
        other = Record()
        other.used(ATTENTION, "")
        monkeypatch.setattr(compat, "first_rank", lambda: False)
        load(FlagHooks(other))
        assert len(caplog.messages) == 4
    with pytest.raises(ValueError, match="--moe-runner-backend hpc_ops: gone"):  # found out after the launcher's check
        record.not_used(MOE, "gone")
        load(hooks, moe_runner_backend="hpc_ops")


def test_what_is_asked_for_stays_used(plugged: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record()
    record.used(ATTENTION, "a")
    record.used(MOE, "b")
    monkeypatch.setattr(compat, "moe_runner_backend", lambda: "hpc_ops")
    assert load(FlagHooks(record), decode_attention_backend="hpc") == "loaded"
    assert record.lines() == ["attention: used: a", "moe: used: b"]


def test_every_hook_is_placed(plugged: Record) -> None:
    """In the installed SGLang each hook's target is there; the record would name one that is not."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    compat.find("sglang.srt.layers.quantization.fp8")
    compat.find(*compat.LINEAR_BF16_FP32)
    assert not any(plugged.reason(operator) for operator in (ATTENTION, ROUTER, MOE))
    for owner, names in ((ModelRunner, compat.MODEL_LOADS), (WeightUpdater, compat.WEIGHT_UPDATES)):
        there = [name for name in names if hasattr(owner, name)]
        assert there and all(hasattr(getattr(owner, name), "__wrapped__") for name in there)
    updates = {name for name in dir(WeightUpdater) if "update_weights" in name or "load_weights" in name}
    # All that writes weights is followed; what begins with an underscore is called by one of these.
    assert {name for name in updates if not name.startswith("_")} <= set(compat.WEIGHT_UPDATES)


def test_modules_are_hooked_when_they_are_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hpc_sglang_probe.py").write_text(
        "class A:\n    def f(self, x):\n        return x\ndef g(x):\n    return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    seen, missing = [], []
    name = "hpc_sglang_probe"
    compat.hook("around", f"{name}:A.f", lambda original, self, x: original(self, x) + 1, missing.append)
    compat.hook("after", f"{name}:g", lambda result, x: seen.append((result, x)), missing.append)
    compat.hook("before", f"{name}:g", lambda x: seen.append(x), missing.append)
    compat.hook("after", f"{name}:B.f", None, missing.append)
    module = compat.find(name)
    assert module.A().f(1) == 2 and module.g(5) == 5 and seen == [5, (5, 5)]
    assert len(missing) == 1 and f"has no {name}:B.f" in missing[0]
    compat.hook("around", f"{name}:A.f", lambda original, self, x: original(self, x) * 10, missing.append)
    assert module.A().f(1) == 20  # a second hook, on a module that is there


def test_a_missing_need_is_not_a_missing_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module of SGLang's imports and is not there is named itself, not that module."""
    (tmp_path / "hpc_sglang_probe_2.py").write_text("import hpc_no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="hpc_no_such_package"):
        compat.find("hpc_sglang_probe_2:name")


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, words in (
        ("0.5.17", ""),
        ("0.5.23.post1", ""),
        ("0.6.0", "sglang 0.6.0 is not one of the versions"),
        ("0.5.16", "0.5.17 to 0.5.23"),
        (None, "not installed"),
    ):
        monkeypatch.setattr(compat, "sglang_version", lambda version=version: version)
        assert words in compat.version_note() and bool(words) == bool(compat.version_note())
    with pytest.raises(compat.Missing, match="has no sglang.no:such or os:no_such"):
        compat.find("sglang.no:such", "os:no_such")
    with pytest.raises(compat.Missing, match="has no module sglang.no.such"):
        compat.find_module("sglang.no.such")
    assert compat.find_module("sglang.no", "sglang.srt.plugins") == "sglang.srt.plugins"
