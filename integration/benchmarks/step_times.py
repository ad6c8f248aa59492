"""Where a decode step's time goes: kernels of one CUDA graph replay, from a trace of SGLang's profiler.

    python3 step_times.py TRACE.json.gz

A replay's kernels share the correlation id of their cudaGraphLaunch. Kernels in order of their start; a kernel is given
the time from the end of everything before it to its own end, so that the times add up to the step even where kernels
overlap (programmatic dependent launch), gaps before a kernel included. Medians over the replays of a trace.
"""

import gzip
import json
import re
import statistics
import sys
from collections import defaultdict
from typing import Any

LEAST_KERNELS = 50  # of a replay of a decode graph; an eager launch has one


def kernels_of(path: str) -> list[dict[str, Any]]:
    """The kernels and copies of a trace, by their start. Times in us."""
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        events = json.load(file)["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((event for event in events if event.get("cat") in kinds), key=lambda event: event["ts"])


def short(name: str) -> str:
    """A kernel's name without its return type, its arguments and what is long in template arguments."""
    name = re.sub(r"^void ", "", name.replace("(anonymous namespace)::", ""))
    return name.split("(", 1)[0][:72]


def breakdown(path: str) -> dict[str, Any]:
    """Medians over a trace's replays.

    Returns "steps", "period_us" (from start to start), "span_us" (first start to last end of a replay), "outside"
    (kernels a step beside the replay, and their us), "kernels": [name, launches a step, us given, us running], by us
    given. Raises ValueError where the trace has fewer than three replays.
    """
    events = kernels_of(path)
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        groups[event.get("args", {}).get("correlation", -1)].append(event)
    most = max((len(group) for group in groups.values()), default=0)
    replays = [group for group in groups.values() if len(group) >= max(LEAST_KERNELS, most // 2)]
    replays.sort(key=lambda group: group[0]["ts"])
    replays = replays[1:-1]  # the first waits for the host, the last has no next
    if len(replays) < 2:
        raise ValueError(f"{path}: expected replays of a CUDA graph, got groups of {most} kernels at most")
    starts = [group[0]["ts"] for group in replays]
    ends = [max(event["ts"] + event["dur"] for event in group) for group in replays]
    per_name: dict[str, list[list[float]]] = defaultdict(lambda: [[0.0, 0.0, 0.0] for _ in replays])
    for number, group in enumerate(replays):
        done = group[0]["ts"]
        for event in group:
            end = event["ts"] + event["dur"]
            cell = per_name[short(event["name"])][number]
            cell[0] += 1
            cell[1] += max(0.0, end - done)
            cell[2] += event["dur"]
            done = max(done, end)
    inside = {id(event) for group in replays for event in group}
    beside = [e for e in events if id(e) not in inside and starts[0] <= e["ts"] < starts[-1]]
    table = [
        [name, *(statistics.median(column) for column in zip(*cells, strict=True))] for name, cells in per_name.items()
    ]
    periods = [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]
    return {
        "steps": len(replays),
        "period_us": statistics.median(periods),
        "span_us": statistics.median(end - start for start, end in zip(starts, ends, strict=True)),
        "outside": [len(beside) / len(periods), sum(event["dur"] for event in beside) / len(periods)],
        "kernels": sorted(table, key=lambda row: -row[2]),
    }


def text(found: dict[str, Any], most: int = 40) -> str:
    """``breakdown`` as lines."""
    count, us = found["outside"]
    launches = sum(row[1] for row in found["kernels"])
    lines = [
        f"{found['steps']} steps: period {found['period_us']:.0f} us, replay {found['span_us']:.0f} us of "
        f"{launches:.0f} kernels, {count:.1f} kernels beside it ({us:.0f} us)",
        "launches   us given  us running  kernel, a step",
    ]
    lines += [f"{n:8.0f} {given:10.1f} {running:11.1f}  {name}" for name, n, given, running in found["kernels"][:most]]
    return "\n".join(lines)


if __name__ == "__main__":
    for trace in sys.argv[1:]:
        print(text(breakdown(trace)), flush=True)
