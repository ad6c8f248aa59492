"""A second SGLang plugin, for the tests: lets the launcher ask a scheduler's process what it counted.

``engine.collective_rpc("hpc_report", path=...)`` writes the process's id, its counters and its record to a file.
``HPC_PROBE_BREAK`` names a fault to plant (``FAULTS``), to see that the tests notice.
"""

import json
import os
import pathlib
from typing import Any


def report(scheduler: Any, path: str) -> None:
    from hpc_sglang.counters import calls
    from hpc_sglang.record import record

    seen = {"pid": os.getpid(), "calls": dict(calls), "lines": record.lines()}
    pathlib.Path(path).write_text(json.dumps(seen))


def register() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.hpc_report = report
    fault = os.environ.get("HPC_PROBE_BREAK")
    if fault:
        FAULTS[fault]()


def wrong_page() -> None:
    """The second page of every request is its first."""
    from hpc_sglang.attention import pages

    fill = pages.fill

    def broken(*args: Any) -> None:
        fill(*args)
        table = args[6]
        table[:, 1:2] = table[:, :1]

    pages.fill = broken


def short_window() -> None:
    """A window of one key less than the model's."""
    from dataclasses import replace

    from hpc_sglang.attention import backend

    shape_of = backend.shape_of

    def broken(layer: Any) -> Any:
        shape = shape_of(layer)
        return shape if shape.window is None else replace(shape, window=shape.window - 1)

    backend.shape_of = broken


def stale_plan() -> None:
    """A plan that is made once and never updated for a batch of the same size."""
    from hpc_attention import DecodePlan

    update = DecodePlan.update

    def broken(plan: Any, seq_lens: Any) -> None:
        if plan.batch != len(seq_lens):
            update(plan, seq_lens)

    DecodePlan.update = broken


def stale_gate() -> None:
    """Gates keep the weight that they were made with."""
    from hpc_sglang.router import gates

    gates.refresh = lambda model: None


FAULTS = {"page": wrong_page, "window": short_window, "plan": stale_plan, "gate": stale_gate}
