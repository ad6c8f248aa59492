"""What was measured to be fastest on a GPU: Configs of the kernels, and the bands of M in which cuBLAS wins.

``hpc tune router`` writes such a table for one's own GPU as a dated JSON file; HPC_ROUTER_TUNED in the environment is
its path. Without one, csrc/config chooses, and ``CROSSOVERS`` below says where ``linear`` goes to cuBLAS.
"""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from hpc_common.checks import fail

from . import _C

ENVIRONMENT = "HPC_ROUTER_TUNED"
_WHERE = f"hpc_router_gemm: {ENVIRONMENT}"
_CONFIG_FIELDS = ("kernel", "rows", "tokens", "k_groups", "split", "stages")
_LATER_FIELDS = ("sums_apart", "presplit", "paired", "pairs_experts")  # older tables have them not: False
CONFIG_FIELDS = (*_CONFIG_FIELDS, *_LATER_FIELDS)


@dataclass(frozen=True)
class Choice:
    """What was fastest for up to ``m_to`` tokens (and more than the row before it has).

    config: fields of ``_C.make_config`` for two terms; config_three: for three, None in older tables, where config
    serves; config_owned_three: for three of a RouterWeight, None in older tables, where config_three serves. us,
    linear_us, cublas_us: microseconds a call of router_gemm with two terms, of linear with three, and of cuBLAS fp32
    with the cast of the activations.
    """

    m_to: int
    config: Mapping[str, Any]
    us: float
    linear_us: float
    cublas_us: float
    config_three: Mapping[str, Any] | None = None
    config_owned_three: Mapping[str, Any] | None = None

    def fields(self, terms: int, presplit: bool) -> Mapping[str, Any] | None:
        """Fields of the Config for that number of terms; None where it needs the terms in memory and has them not."""
        found = self.config
        if terms == 3:
            found = (self.config_owned_three if presplit else None) or self.config_three or found
        return None if found["presplit"] and not presplit else found


@dataclass(frozen=True)
class Tuned:
    """A measured table. device: the GPU's name; date: ISO 8601; choices: by (N, K), ascending in m_to."""

    device: str
    date: str
    choices: Mapping[tuple[int, int], Sequence[Choice]]

    def choice(self, m: int, n: int, k: int) -> Choice | None:
        """The row that serves M = m, or None for a size that was not measured or an M above all that were."""
        return next((row for row in self.choices.get((n, k), ()) if m <= row.m_to), None)


# Crossovers that ship: for each GPU the date of the measurement, and for each (N, K) the bands (first M, last M) in
# which cuBLAS fp32, the cast of the activations included, was faster than linear's three terms. Nowhere so far: nearest
# at M = 1, where cuBLAS took 1.09 (768 x 6144) to 3.3 times as long; from M = 16 on 3 times and more. `router.py
# --decode` measures both for M = 1 to 128 (benchmarks/results/h200_decode.json). Sizes that are not listed go to the
# kernels.
CROSSOVERS: dict[str, tuple[str, dict[tuple[int, int], tuple[tuple[int, int], ...]]]] = {
    "NVIDIA H200": (
        "2026-11-30",
        {
            (192, 4096): (),
            (384, 3072): (),
            (768, 6144): (),
            (256, 7168): (),
            (128, 2048): (),
            (896, 7168): (),
            (64, 2048): (),
        },
    ),
}


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _CONFIG_FIELDS} | {name: row.get(name, False) for name in _LATER_FIELDS}


def _row(path: pathlib.Path, row: Any) -> tuple[tuple[int, int], Choice]:
    try:
        size = int(row["n"]), int(row["k"])
        config = _fields(row)
        three, owned_three = (_fields(row[name]) if name in row else None for name in ("three", "owned_three"))
        times = {name: float(row[name]) for name in ("us", "linear_us", "cublas_us")}
        _C.make_config(m=int(row["m_to"]), n=size[0], k=size[1], terms=2, **config)
        for fields in (three, owned_three):
            if fields is not None:
                _C.make_config(m=int(row["m_to"]), n=size[0], k=size[1], terms=3, **fields)
        return size, Choice(int(row["m_to"]), config, **times, config_three=three, config_owned_three=owned_three)
    except (KeyError, TypeError, ValueError) as error:
        fail(_WHERE, str(path), "a table that hpc tune router wrote", f"the row {row!r} ({error})")


def load(path: str | pathlib.Path) -> Tuned:
    """A table from a file of ``hpc tune router``. ValueError where it cannot be read or is no such table."""
    path = pathlib.Path(path)
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        fail(_WHERE, str(path), "a table that hpc tune router wrote", error)
    if not isinstance(document, dict) or not {"device", "date", "rows"} <= document.keys():
        fail(_WHERE, str(path), "a table that hpc tune router wrote", "no device, date or rows")
    choices: dict[tuple[int, int], list[Choice]] = {}
    for row in document["rows"]:
        size, choice = _row(path, row)
        choices.setdefault(size, []).append(choice)
    for rows in choices.values():
        rows.sort(key=lambda choice: choice.m_to)
    return Tuned(str(document["device"]), str(document["date"]), choices)


@cache
def _of_environment() -> Tuned | None:
    path = os.environ.get(ENVIRONMENT, "")
    return load(path) if path else None


@cache
def of_device(name: str) -> Tuned | None:
    """The table that HPC_ROUTER_TUNED names where it was measured on a GPU called ``name``; read once a process."""
    table = _of_environment()
    return table if table is not None and table.device == name else None


@lru_cache(maxsize=4096)
def _config(name: str, m: int, n: int, k: int, terms: int, presplit: bool) -> "_C.Config | None":
    table = of_device(name)
    choice = None if table is None else table.choice(m, n, k)
    fields = None if choice is None else choice.fields(terms, presplit)
    if fields is None:
        return None
    try:
        return _C.make_config(m=m, n=n, k=k, terms=terms, **fields)
    except ValueError:  # its stages don't fit with other terms, say
        return None


@cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def config_of(device: torch.device, m: int, n: int, k: int, terms: int, presplit: bool = False) -> "_C.Config | None":
    """The tuned Config for fp32 weights, or None where csrc/config is to choose. One token or more.

    presplit: the weight's terms are in memory too.
    """
    if _of_environment() is None:
        return None
    return _config(_device_name(device.index), m, n, k, terms, presplit)


def cublas_is_faster(name: str, m: int, n: int, k: int) -> bool:
    """Whether cuBLAS fp32 was measured to be faster than ``linear`` on a GPU called ``name``."""
    table = of_device(name)
    choice = None if table is None else table.choice(m, n, k)
    if choice is not None:
        return choice.cublas_us < choice.linear_us
    _, sizes = CROSSOVERS.get(name, ("", {}))
    return any(first <= m <= last for first, last in sizes.get((n, k), ()))


def linear_uses_cublas(device: torch.device, m: int, n: int, k: int) -> bool:
    """``cublas_is_faster`` on a CUDA device."""
    return cublas_is_faster(_device_name(device.index), m, n, k)
