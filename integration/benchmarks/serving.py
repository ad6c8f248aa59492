"""Serving in SGLang, this package's plugin beside other backends: time a token, time to the first one, throughput.

    python3 serving.py --backend hpc --backend default --json h200.json --plot h200.png
    python3 serving.py --backend hpc --soak 400

Every backend serves the same model (dummy weights of Qwen3-30B-A3B-FP8's shape, or --config) in engines of its own, one
after the other. A row is a batch: requests that arrive together with prompts of the lengths given. Each is generated
with one new token, which gives the time to the first token (TTFT, of the whole batch), and with ``--tokens``:

    TPOT = (time with --tokens - time with 1) / (--tokens - 1), medians over --repeats, taken in turns

Prompts are random and the radix cache is off, so nothing is reused. With --soak, mixed requests follow each other
instead, and what is checked is that all of them end, that every logprob is a number, and that memory does not grow.
"""

import argparse
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from hpc_common.lengths import format_lengths, parse_lengths

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
    disable_radix_cache=True, mem_fraction_static=0.75, log_level="warning", random_seed=1,
    disable_prefill_cuda_graph=True,  # their capture takes a minute and a half
)  # fmt: skip


def lengths_of(row: str) -> list[int]:
    """Prompt lengths of a row: "azure", or the notation of hpc_common.lengths."""
    return list(AZURE) if row == "azure" else parse_lengths(row)


class Server:
    """One engine and what is asked of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        import sglang

        arguments, _ = BACKENDS[options.one]
        folder = tempfile.mkdtemp()
        config = json.loads(pathlib.Path(options.config).read_text()) if options.config else QWEN3_30B_A3B
        pathlib.Path(folder, "config.json").write_text(json.dumps(config))
        self.vocabulary = config["vocab_size"]
        self.random = random.Random(0)
        more = dict(pair.split("=", 1) for pair in options.engine)
        more = {name: json.loads(value) if value[:1] in '"[{-0123456789tfn' else value for name, value in more.items()}
        start = time.perf_counter()
        self.engine = sglang.Engine(model_path=folder, **{**ENGINE, **arguments, **more})
        self.start_s = time.perf_counter() - start

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        return [[self.random.randrange(self.vocabulary) for _ in range(length)] for length in lengths]

    def seconds(self, lengths: list[int], new_tokens: int) -> float:
        """How long a batch takes from its arrival to its last token."""
        prompts = self.prompts(lengths)
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        start = time.perf_counter()
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        end = time.perf_counter()
        made = [len(answer["output_ids"]) for answer in answers]
        if made != [new_tokens] * len(lengths):
            raise RuntimeError(f"asked for {new_tokens} tokens of each request, got {made}")
        return end - start

    def row(self, row: str, new_tokens: int, repeats: int) -> dict[str, Any]:
        lengths = lengths_of(row)
        self.seconds(lengths, 4)  # kernels are compiled and tuned for these sizes
        first, whole = [], []
        for _ in range(repeats):
            first.append(self.seconds(lengths, 1))
            whole.append(self.seconds(lengths, new_tokens))
        ttft, total = statistics.median(first), statistics.median(whole)
        return {
            "row": row,
            "requests": len(lengths),
            "prompt_tokens": sum(lengths),
            "new_tokens": new_tokens,
            "tpot_ms": 1e3 * (total - ttft) / (new_tokens - 1),
            "ttft_ms": 1e3 * ttft,
            "tokens_per_s": len(lengths) * new_tokens / total,
        }

    def soak(self, count: int, most: int) -> dict[str, Any]:
        """``count`` requests of mixed lengths, all handed over at once; raises where one is not as asked."""
        lengths = [int(math.exp(self.random.uniform(math.log(8), math.log(most)))) for _ in range(count)]
        wanted = [self.random.randint(4, 200) for _ in range(count)]
        self.seconds(lengths[:16], 8)
        before, start = device_memory(), time.perf_counter()
        answers = self.engine.generate(
            input_ids=self.prompts(lengths),
            sampling_params=[{"temperature": 0.8, "max_new_tokens": n, "ignore_eos": True} for n in wanted],
            return_logprob=True,
        )
        seconds = time.perf_counter() - start
        for number, (answer, want) in enumerate(zip(answers, wanted, strict=True)):
            logprobs = [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]
            if len(logprobs) != want or not all(math.isfinite(value) and value <= 0 for value in logprobs):
                raise RuntimeError(
                    f"request {number} ({lengths[number]} tokens): {len(logprobs)} of {want}: {logprobs}"
                )
        after = device_memory()
        return {"row": f"soak {count}", "requests": count, "seconds": seconds, "tokens": sum(wanted),
                "memory_mib": [before, after]}  # fmt: skip


def device_memory() -> int | None:
    """MiB in use on the first GPU; None where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError):
        return None


def serve_one(options: argparse.Namespace) -> None:
    """The child's part: all rows of one backend, each printed as one JSON line on the original stdout."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(entry: dict[str, Any]) -> None:
        print(json.dumps({"backend": options.one, **entry}), file=reply, flush=True)

    server = Server(options)
    say({"row": "start", "seconds": server.start_s})
    if options.soak:
        say(server.soak(options.soak, options.longest))
    for row in [] if options.soak else options.row:
        say(server.row(row, options.tokens, options.repeats))
    server.engine.shutdown()


def collect(options: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    """Every backend in a process of its own; a backend that fails is a row with its last words."""
    rows = []
    for backend in options.backend:
        environment = {**os.environ, **BACKENDS[backend][1]}
        command = [sys.executable, __file__, "--one", backend, *arguments]
        with tempfile.TemporaryFile("w+") as log:
            child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
            for line in child.stdout:
                rows.append(json.loads(line))
                print(text(rows[-1]), flush=True)
            if child.wait():
                log.seek(0)
                last = log.read()[-2000:]
                rows.append({"backend": backend, "row": "failed", "log": last})
                print(f"{backend}: failed\n{last}", flush=True)
    return rows


def text(entry: dict[str, Any]) -> str:
    numbers = {name: value for name, value in entry.items() if name not in ("backend", "row", "log")}
    shown = (
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()
    )
    return f"{entry['backend']:14s} {entry['row']:14s} {', '.join(shown)}"


def table(rows: list[dict[str, Any]], value: str = "tpot_ms") -> str:
    """A Markdown table of one value: rows by backends."""
    measured = [entry for entry in rows if value in entry]
    backends = list(dict.fromkeys(entry["backend"] for entry in measured))
    lines = [f"| {value} | " + " | ".join(backends) + " |", "|---|" + "---|" * len(backends)]
    for row in dict.fromkeys(entry["row"] for entry in measured):
        found = {entry["backend"]: entry[value] for entry in measured if entry["row"] == row}
        lines.append(f"| {row} | " + " | ".join(f"{found[b]:.2f}" if b in found else "" for b in backends) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Bars of the time a token, one group a row, one colour a backend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [entry for entry in rows if "tpot_ms" in entry]
    names = list(dict.fromkeys(entry["row"] for entry in measured))
    backends = list(dict.fromkeys(entry["backend"] for entry in measured))
    figure, axes = pyplot.subplots(figsize=(1.6 * len(names) + 2, 4), layout="constrained")
    width = 0.8 / max(1, len(backends))
    for number, backend in enumerate(backends):
        found = {entry["row"]: entry["tpot_ms"] for entry in measured if entry["backend"] == backend}
        places = [place + (number - (len(backends) - 1) / 2) * width for place in range(len(names))]
        axes.bar(places, [found.get(name, float("nan")) for name in names], width, label=backend)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("time a token, ms")
    axes.set_title("SGLang, requests x prompt tokens")
    axes.legend()
    figure.savefig(path, dpi=150)


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows with what they were measured on."""
    from importlib import import_module, metadata

    from hpc_common.timing import results

    operators = ("hpc_attention", "hpc_router_gemm", "hpc_moe")
    builds = {name: import_module(f"{name}._C").build_info() for name in operators}
    made = results([], builds)
    return {**made, "sglang": metadata.version("sglang"), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=list(BACKENDS), help="default: hpc and default")
    parser.add_argument("--row", action="append", help=f"lengths such as 1x32K+15x1K, or azure; default {ROWS}")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--soak", type=int, default=0, metavar="REQUESTS", help="mixed requests instead of rows")
    parser.add_argument("--longest", type=int, default=16384, help="longest prompt of --soak")
    parser.add_argument("--config", help="a config.json; default the shape of Qwen3-30B-A3B-FP8")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="more engine arguments")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--plot", help="draw the rows here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.row = options.row or list(ROWS)
    options.backend = options.backend or ["hpc", "default"]
    for row in options.row:
        if row != "azure":
            format_lengths(parse_lengths(row))
    if options.one:
        serve_one(options)
        return
    rows = collect(options, sys.argv[1:])
    print(table(rows))
    if options.json:
        from hpc_common.timing import write_results

        write_results(options.json, document(rows))
    if options.plot:
        plot(rows, options.plot)
    if any(entry["row"] == "failed" for entry in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
