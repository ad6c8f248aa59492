"""What a device can run, and the support tables that the checks, the tests and the README are made from."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

from .checks import fail

REQUIRED_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Capability:
    """A device as the operators see it.

    name: "cpu" or the GPU's name. compute: compute capability (major, minor), None on a CPU. num_sms: 0 on a CPU.
    usable: whether kernels of this project run on it. reason: why not, or "".
    """

    device: str
    name: str
    compute: tuple[int, int] | None
    num_sms: int
    usable: bool
    reason: str


@cache
def _gpu(index: int) -> Capability:
    properties = torch.cuda.get_device_properties(index)
    compute = (properties.major, properties.minor)
    usable = compute == REQUIRED_CAPABILITY
    reason = "" if usable else f"compute capability {compute[0]}.{compute[1]}; the kernels need 9.0 (sm_90a, Hopper)"
    return Capability(f"cuda:{index}", properties.name, compute, properties.multi_processor_count, usable, reason)


def as_device(where: str, device: torch.device | str | None) -> torch.device:
    """``device`` as a torch.device; for None the current GPU where there is one, else the CPU.

    Raises TypeError for another type, ValueError for a string that names no device of torch's, naming ``where``.
    """
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not isinstance(device, torch.device | str):
        got = f"{type(device).__name__} {device!r}"
        fail(where, "device", "a torch.device, a device's name or None", got, TypeError)
    try:
        return torch.device(device)
    except RuntimeError:
        fail(where, "device", 'the name of a device ("cpu", "cuda", "cuda:1")', repr(device))


def capability(device: torch.device | str | None = None, where: str = "hpc_common.capability") -> Capability:
    """The capability of ``device`` (default: the current GPU where there is one, else the CPU), cached per device.

    Raises TypeError for what is no device, ValueError for a device type other than cpu and cuda, or a GPU that is not
    there; ``where`` is the function named in the message.
    """
    device = as_device(where, device)
    if device.type == "cpu":
        return Capability("cpu", "cpu", None, 0, True, "")
    if device.type != "cuda":
        fail(where, "device", "cpu or cuda", device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else (torch.cuda.current_device() if count else 0)
    if index >= count:
        fail(where, "device", f"one of {count} visible GPUs", device)
    return _gpu(index)


@dataclass(frozen=True)
class Support:
    """One row of an operator's support table.

    operator: public name, e.g. "decode". feature: what of it, in a few words, e.g. "e4m3 cache, bf16 query".
    cpu, cuda: whether it runs there ("cuda" means a Hopper GPU). note: limits, or why not.
    """

    operator: str
    feature: str
    cpu: bool = True
    cuda: bool = False
    note: str = ""


def lookup(table: Iterable[Support], operator: str, feature: str) -> Support:
    """The row of ``operator`` and ``feature``; KeyError where the table has none."""
    for row in table:
        if row.operator == operator and row.feature == feature:
            return row
    raise KeyError(f"{operator}: {feature}")


def why_not(table: Iterable[Support], operator: str, feature: str, device: torch.device) -> str:
    """Why ``operator`` with ``feature`` does not run on ``device`` (also where it is not there); "" where it does."""
    row = lookup(table, operator, feature)
    if device.type == "cpu":
        return "" if row.cpu else (row.note or "no CPU implementation")
    try:
        machine = capability(device)
    except ValueError as missing:
        return str(missing)
    if not machine.usable:
        return f"{machine.device} ({machine.name}) has {machine.reason}"
    return "" if row.cuda else (row.note or "no GPU kernel yet; CPU tensors run")


def require(where: str, table: Iterable[Support], operator: str, feature: str, device: torch.device) -> None:
    """ValueError unless ``operator`` with ``feature`` runs on ``device``; the message says what and why not."""
    if device.type not in ("cpu", "cuda"):
        if device.type == "meta":
            return
        fail(where, "device", "cpu or cuda", device)
    reason = why_not(table, operator, feature, device)
    if reason:
        fail(where, "device", f"one that runs {operator} ({feature})", f"{device}: {reason}")
