"""What the user asked for by flag: an error at start where it can't be had, and the start-up lines.

Two moments: when the launcher checks its arguments, and when a scheduler process has loaded its model.
"""

from typing import Any

from . import compat, router
from .record import ATTENTION, MOE, Record

ATTENTION_FLAGS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)
MOE_FLAGS = ("moe_runner_backend", "speculative_moe_runner_backend")
ATTENTION_NAME, MOE_NAME = "hpc", "hpc_ops"


def asked(arguments: Any, flags: tuple[str, ...], value: str) -> list[str]:
    """Those of ``flags`` (names of server arguments) that have ``value``, as the user writes them."""
    return [f"--{flag.replace('_', '-')} {value}" for flag in flags if getattr(arguments, flag, None) == value]


def refusals(arguments: Any, record: Record) -> list[str]:
    """Flags that ask for an operator which is not used, each with the reason."""
    found = []
    for operator, flags, value in ((ATTENTION, ATTENTION_FLAGS, ATTENTION_NAME), (MOE, MOE_FLAGS, MOE_NAME)):
        reason = record.reason(operator)
        if operator == MOE and compat.upstream_hpc():
            continue  # the name is SGLang's own, and so is then the function behind it
        if not reason and getattr(arguments, "enable_pdmux", False) and operator == MOE:
            reason = "prefill and decode at the same time (--enable-pdmux) are not supported: layers share a workspace"
        if reason:
            found += [f"{flag}: {reason}" for flag in asked(arguments, flags, value)]
    try:
        router.terms_asked()
    except ValueError as error:
        found.append(str(error))
    return found


def register(record: Record) -> None:
    """Hook the check of arguments and the loading of a model. Nothing is refused where these are not found."""
    hooks = FlagHooks(record)
    compat.hook("before", "sglang.srt.server_args:ServerArgs.check_server_args", hooks.check, hooks.failed)
    compat.hook("around", f"{compat.MODEL_RUNNER}:ModelRunner.load_model", hooks.load, hooks.failed)
    if record.reason(ATTENTION):
        # So that the flag reaches the check, which says the reason, rather than end as an invalid choice.
        try:
            choices = compat.attention_choices()[0]
        except compat.Missing as error:
            hooks.failed(str(error))
        else:
            if ATTENTION_NAME not in choices:
                choices.append(ATTENTION_NAME)


class FlagHooks:
    """The hooks, and the record they share."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def failed(self, reason: str) -> None:
        """A hook could not be placed."""
        self.record.note(f"what is asked for by flag is not checked at start: {reason}")

    def check(self, arguments: Any, *args: Any, **kwargs: Any) -> None:
        """Before ServerArgs.check_server_args. Raises ValueError for flags that ask for what can't be had."""
        found = refusals(arguments, self.record)
        if found:
            raise ValueError("hpc-sglang: " + "; ".join(found))

    def load(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        """ModelRunner.load_model in a scheduler: check once more after it, then say what is used, on the first rank."""
        self.record.quiet = not compat.first_rank()
        result = original(runner, *args, **kwargs)
        self.check(runner.server_args)
        self.settle(runner.server_args)
        self.record.announce()
        return result

    def settle(self, arguments: Any) -> None:
        """What is registered but not asked for is not used."""
        if not self.record.reason(ATTENTION) and not asked(arguments, ATTENTION_FLAGS, ATTENTION_NAME):
            self.record.not_used(ATTENTION, f"--attention-backend {ATTENTION_NAME} is not set")
        if not self.record.reason(MOE) and compat.moe_runner_backend() != MOE_NAME:
            self.record.not_used(MOE, f"--moe-runner-backend {MOE_NAME} is not set")
