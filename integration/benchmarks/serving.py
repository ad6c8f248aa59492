"""Serving in SGLang, this package's plugin beside other backends: time a token, time to the first one, throughput.

    python3 serving.py --backend hpc --backend default --json results/h200.json     # then figures.py
    python3 serving.py --backend hpc --soak 4000

Every backend serves the same model (dummy weights of Qwen3-30B-A3B-FP8's shape, or --config) in an engine of its own,
one after the other or --together. A row is a batch: requests that arrive together with prompts of the lengths given.
With prompts never seen before and one new token each, it gives the time to the first token (TTFT, of the whole batch).
Then the same prompts, now in the prefix cache, so that little but decode is left:

    TPOT = (time with --tokens - time with 1) / (--tokens - 1), medians over --repeats, taken in turns

Beside it stands the time of a decode step of the whole batch by SGLang's own count (``step_ms``), which no prefill and
no arrival is part of.

--row, --profile, --soak and --wait are done in the order given; without any of them, all rows. --profile says where a
decode step's time goes, kernel by kernel. With --soak this package is given mixed requests, in waves. All of them must
end and every logprob must be a number; between waves the scheduler's process says what its allocator and this package
hold, which must not grow after the first wave. --wait FILE waits for a file, so that rows are measured when another job
has left the GPU; of a --soak just before it, waves still to come are left out once the file is there.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

import step_times
from hpc_common.lengths import format_lengths, parse_lengths
from hpc_common.timing import results, write_results

HERE = pathlib.Path(__file__).parent

QWEN3_30B_A3B = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=151936, hidden_size=2048,
    intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    decoder_sparse_step=1, mlp_only_layers=[], hidden_act="silu", max_position_embeddings=65536, rms_norm_eps=1e-6,
    rope_theta=1000000.0, tie_word_embeddings=False, torch_dtype="bfloat16", initializer_range=0.02,
    attention_bias=False, attention_dropout=0.0, use_cache=True, bos_token_id=151643, eos_token_id=151645,
    quantization_config=dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128]
    ),
)  # fmt: skip

# Cache lengths of 64 requests of a conversation service (drawn by hpc_tools.requests, seed 0, ascending), from the
# Azure Public Dataset, "Azure LLM inference trace 2023", CC-BY; Patel et al., Splitwise, ISCA 2024.
AZURE = (
    109, 143, 172, 241, 244, 279, 304, 314, 322, 354, 364, 367, 470, 488, 518, 542, 576, 619, 675, 709, 730, 801, 862,
    876, 878, 889, 892, 938, 951, 983, 1031, 1031, 1101, 1104, 1141, 1154, 1182, 1197, 1207, 1207, 1221, 1247, 1269,
    1299, 1303, 1313, 1314, 1408, 1443, 1461, 1630, 1792, 1822, 2106, 2113, 2121, 2743, 2786, 3305, 3530, 3900, 4093,
    4127, 4136,
)  # fmt: skip
WAVE = 100  # requests of --soak that are handed over at once
GROWTH_MIB = 16  # that a soak may add to what torch has allocated: the prefix cache keeps tensors of its own
ROWS = ("1x1K", "8x1K", "32x1K", "1x32K+15x1K", "64x1K", "azure")

# name -> arguments of the engine, environment. All but ours run without this package's plugin.
WITHOUT = {"SGLANG_PLUGINS": "none"}
BACKENDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "hpc": (dict(attention_backend="hpc", moe_runner_backend="hpc_ops", page_size=64), {}),
    "hpc-attention": (dict(attention_backend="hpc", moe_runner_backend="triton", page_size=64), {}),
    "hpc-moe": (dict(attention_backend="fa3", moe_runner_backend="hpc_ops"), {}),
    "default": (dict(attention_backend="fa3", moe_runner_backend="triton"), WITHOUT),
    "triton": (dict(attention_backend="triton", moe_runner_backend="triton"), WITHOUT),
    "upstream-hpc": (dict(attention_backend="hpc_ops", moe_runner_backend="hpc_ops", page_size=64), WITHOUT),
}
ENGINE = dict(
    load_format="dummy", skip_tokenizer_init=True, sampling_backend="pytorch", grammar_backend="none",
    mem_fraction_static=0.75, log_level="info",
    decode_log_interval=20, random_seed=1,
    disable_prefill_cuda_graph=True,  # their capture takes a minute and a half
)  # fmt: skip


def lengths_of(row: str) -> list[int]:
    """Prompt lengths of a row: "azure", or the notation of hpc_common.lengths."""
    return list(AZURE) if row == "azure" else parse_lengths(row)


def step_ms(log: str, requests: int) -> float | None:
    """Milliseconds a decode step of that many requests by SGLang's own count, in an engine's log; None: no line.

    A line is an average over ``decode_log_interval`` steps; one that holds prefill or a pause as well is longer, so the
    least one counts.
    """
    lines = re.findall(r"Decode batch.*#running-req: (\d+),.*gen throughput \(token/s\): ([\d.]+)", log)
    steps = [1e3 * requests / float(rate) for running, rate in lines if int(running) == requests and float(rate) > 0]
    return min(steps, default=None)


class Child:
    """An engine of one backend in a process of its own (``serving_child``), and everything it said."""

    def __init__(self, backend: str, options: argparse.Namespace) -> None:
        arguments, environment = BACKENDS[backend]
        more = dict(pair.split("=", 1) for pair in options.engine)
        more = {name: json.loads(value) if value[:1] in '"[{-0123456789tfn' else value for name, value in more.items()}
        config = json.loads(pathlib.Path(options.config).read_text()) if options.config else QWEN3_30B_A3B
        own = {"nccl_port": 28861 + 10 * list(BACKENDS).index(backend)}  # else two that start together take the same
        given = {"arguments": {**ENGINE, **own, **arguments, **more}, "config": config}
        self.backend = backend
        self.rows: list[dict[str, Any]] = []
        paths = [str(HERE / "probe_memory"), os.environ.get("PYTHONPATH")]
        probe = {} if environment is WITHOUT else {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        kept = options.traces and pathlib.Path(options.traces, f"{backend}.log")
        self.log = open(kept, "w+") if kept else tempfile.TemporaryFile("w+")  # noqa: SIM115, the child's
        self.process = subprocess.Popen(
            [sys.executable, HERE / "serving_child.py", json.dumps(given)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, env={**os.environ, **environment, **probe},
        )  # fmt: skip

    def hear(self, wave: bool = False) -> bool:
        """Wait for one reply and print it; False where the child has ended, whose last words are then a row.

        wave: the reply is one of a soak's, whose row so far is printed.
        """
        line = self.process.stdout.readline()
        if line:
            self.rows.append({"backend": self.backend, **json.loads(line)})
        elif self.process.wait() or not self.rows:
            self.log.seek(0)
            self.rows.append({"backend": self.backend, "row": "failed", "log": self.log.read()[-3000:]})
        if line and wave:
            join_waves(self.rows)
        print(text(self.rows[-1]), flush=True)
        return bool(line)

    def ask(self, **command: Any) -> bool:
        """Send a command and hear its reply; False where there is no child any more."""
        if self.rows and self.rows[-1]["row"] == "failed":
            return False
        start = os.fstat(self.log.fileno()).st_size
        try:
            print(json.dumps(command), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass
        heard = self.hear(command["do"] == "soak")
        if heard and command["do"] == "row":
            log = os.pread(self.log.fileno(), os.fstat(self.log.fileno()).st_size - start, start)  # the child writes on
            self.rows[-1]["step_ms"] = step_ms(log.decode(errors="replace"), len(command["lengths"]))
        return heard

    def end(self) -> None:
        """Let the engine go."""
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait()


def join_waves(rows: list[dict[str, Any]]) -> None:
    """Make the last row, a wave of a soak, part of the row before it where that is a soak's too.

    "memory" is then what was held after each wave, "grew" what was held more after the last one than after the first:
    bytes of torch's allocator ("allocated", "reserved") and of this package by name.
    """
    wave = rows.pop()
    if not rows or rows[-1]["row"] != wave["row"]:
        rows.append({**wave, "waves": 0, "memory": [], "requests": 0, "prompt_tokens": 0, "tokens": 0, "seconds": 0.0})
    soak = rows[-1]
    soak["waves"] += 1
    soak["memory"] = [*soak["memory"], wave["memory"]]
    for name in ("requests", "prompt_tokens", "tokens", "seconds"):
        soak[name] += wave[name]
    first, last = soak["memory"][0], soak["memory"][-1]
    soak["grew"] = {name: last[name] - first.get(name, 0) for name in last}


def grown(rows: list[dict[str, Any]]) -> list[str]:
    """What grew over a soak that must not: workspaces at all, torch's memory by more than GROWTH_MIB.

    Page tables beyond the captured sizes are as large as the largest batch so far, in doublings. What torch reserves
    depends on how blocks of all sizes fit; it is in the row and not held to anything.
    """
    free = dict.fromkeys(("allocated", "attention.tables"), GROWTH_MIB << 20)
    return [
        f"{entry['backend']} {entry['row']}: {name} grew by {more} bytes"
        for entry in rows
        for name, more in entry.get("grew", {}).items()
        if name != "reserved" and more > free.get(name, 0)
    ]


def commands(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What every backend is asked, in this order; {"do": "wait"} is for nobody."""
    tasks = options.tasks or [("row", row) for row in ROWS]
    asked: list[dict[str, Any]] = []
    for number, (kind, value) in enumerate(tasks):
        if kind == "wait":
            asked.append({"do": "wait", "file": value})
        elif kind == "soak":
            following = tasks[number + 1] if number + 1 < len(tasks) else ("", "")
            until = following[1] if following[0] == "wait" else ""
            asked += [
                {"do": "soak", "row": f"soak {number}", "count": min(WAVE, value - start), "longest": options.longest,
                 "until": until}
                for start in range(0, value, WAVE)
            ]  # fmt: skip
        elif kind == "profile":
            asked.append({"do": "profile", "row": value, "lengths": lengths_of(value), "tokens": 16,
                          "behind": options.behind, "folder": options.traces})  # fmt: skip
        else:
            asked.append({"do": "row", "row": value, "lengths": lengths_of(value), "tokens": options.tokens,
                          "repeats": options.repeats, "behind": options.behind})  # fmt: skip
    return asked


def collect(options: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """All rows of all backends: one after the other, or --together: started at once, and every row asked in turns.

    keep: called with the rows so far after every command, so that little is lost where a run is cut off.
    """
    groups = [options.backend] if options.together else [[backend] for backend in options.backend]
    rows = []
    for group in groups:
        children = [Child(backend, options) for backend in group]
        for child in children:
            child.hear()
        for command in commands(options):
            if command["do"] == "wait":
                print(f"waiting for {command['file']}", flush=True)
                while not os.path.exists(command["file"]):
                    time.sleep(0.1)
                continue
            until = command.pop("until", "")
            if until and os.path.exists(until):
                continue
            for child in children:
                if command["do"] != "soak" or BACKENDS[child.backend][1] is not WITHOUT:
                    child.ask(**command)
            keep(rows + [row for child in children for row in child.rows])
        for child in children:
            child.end()
            rows += child.rows
    keep(rows)
    return rows


def text(entry: dict[str, Any]) -> str:
    numbers = {name: value for name, value in entry.items() if name not in ("backend", "row", "log", "step", "memory")}
    shown = (
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()
    )
    more = "\n" + step_times.text(entry["step"]) if "step" in entry else entry.get("log", "")
    return f"{entry['backend']:14s} {entry['row']:14s} {', '.join(shown)}{more}"


def table(rows: list[dict[str, Any]], value: str) -> str:
    """A Markdown table of one value: rows by backends."""
    measured = [entry for entry in rows if entry.get(value) is not None]
    backends = list(dict.fromkeys(entry["backend"] for entry in measured))
    lines = [f"| {value} | " + " | ".join(backends) + " |", "|---|" + "---|" * len(backends)]
    for row in dict.fromkeys(entry["row"] for entry in measured):
        found = {entry["backend"]: entry[value] for entry in measured if entry["row"] == row}
        lines.append(f"| {row} | " + " | ".join(f"{found[b]:.2f}" if b in found else "" for b in backends) + " |")
    return "\n".join(lines)


def document() -> dict[str, Any]:
    """What rows are measured on."""
    operators = ("hpc_attention", "hpc_router_gemm", "hpc_moe")
    builds = {name: import_module(f"{name}._C").build_info() for name in operators}
    return {**results([], builds), "sglang": metadata.version("sglang")}


class Task(argparse.Action):
    """Keeps the options that ask for something in the order given, as pairs of name and value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), (option_string.lstrip("-"), values)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=list(BACKENDS), help="default: hpc and default")
    task = dict(action=Task, dest="tasks", default=[])
    parser.add_argument("--row", **task, help=f"lengths such as 1x32K+15x1K, or azure; default {ROWS}")
    parser.add_argument("--profile", **task, metavar="ROW", help="kernels of a decode step")
    parser.add_argument("--soak", **task, type=int, metavar="REQUESTS", help="mixed requests, at most so many")
    parser.add_argument("--wait", **task, metavar="FILE", help="wait until this file is there")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--behind", type=int, default=8192, help="tokens of the prompt that a batch gathers behind")
    parser.add_argument("--together", action="store_true", help="engines side by side on the GPU, asked in turns")
    parser.add_argument("--traces", help="keep logs, and traces of --profile, in this folder")
    parser.add_argument("--longest", type=int, default=16384, help="longest prompt of --soak")
    parser.add_argument("--config", help="a config.json; default the shape of Qwen3-30B-A3B-FP8")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="more engine arguments")
    parser.add_argument("--json", help="write the rows here")
    options = parser.parse_args()
    options.backend = options.backend or ["hpc", "default"]
    for kind, row in options.tasks:
        if kind in ("row", "profile") and row != "azure":
            format_lengths(parse_lengths(row))
    about = document() if options.json else {}

    def keep(rows: list[dict[str, Any]]) -> None:
        if options.json:
            write_results(options.json, {**about, "rows": rows})

    rows = collect(options, keep)
    print(table(rows, "step_ms"))
    growth = grown(rows)
    print("\n".join(growth))
    if growth or any(entry["row"] == "failed" for entry in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
