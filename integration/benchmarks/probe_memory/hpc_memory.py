"""SGLang plugin of serving.py: a scheduler's process says how much memory it holds on its GPU.

``engine.collective_rpc("hpc_memory_report", path=...)`` writes JSON: bytes "allocated" and "reserved" by torch, and
what hpc_sglang holds by name. Other processes on the same GPU don't count.
"""

import json
import pathlib
from typing import Any

import torch


def report(scheduler: Any, path: str) -> None:
    from hpc_sglang.compat import first_rank
    from hpc_sglang.counters import made_bytes

    held = {"allocated": 0, "reserved": 0}
    if torch.cuda.is_available():
        held = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    if first_rank():
        pathlib.Path(path).write_text(json.dumps({**held, **made_bytes}))


def register() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.hpc_memory_report = report
