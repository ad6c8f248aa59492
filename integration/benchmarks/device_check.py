"""Whether the attention backend says on a GPU what SGLang's others say, with CUDA graphs, bf16 and FP8 caches.

    python3 device_check.py                      # triton, fa3, hpc; table last, exit status 1 where a bound is passed
    python3 device_check.py --backend triton --backend flashinfer --backend hpc

One model with random weights (Qwen3-MoE; not a model that upstream's FP8 attention knows), served by every backend in
an engine of its own, all side by side. Requests of mixed lengths say tokens known beforehand
(``probe/hpc_forced.py``), and the logprobs of these are compared, step by step. The bound: this package's mean
difference from each of the two other backends is at most 1.5 times the difference between those two.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).parent
BOUND = 1.5
MODEL = dict(
    vocab_size=4096, hidden_size=1024, intermediate_size=1024, moe_intermediate_size=512, num_hidden_layers=6,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=16, num_experts_per_tok=4,
    norm_topk_prob=True, max_position_embeddings=16384, initializer_range=0.15, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
NEW_TOKENS = 48
LENGTHS = (1, 130, 511, 900, 4000, 64, 9000, 192, 1023, 256, 333, 2500, 700, 400, 4111, 640)
ENGINE = dict(
    skip_tokenizer_init=True, sampling_backend="pytorch", grammar_backend="none", max_total_tokens=40960,
    max_running_requests=16, chunked_prefill_size=32768, max_prefill_tokens=32768, disable_radix_cache=True,
    mem_fraction_static=0.3, moe_runner_backend="triton", log_level="info", disable_overlap_schedule=True,
    disable_prefill_cuda_graph=True,  # their capture takes longer than all the rest
)  # fmt: skip


def make_checkpoint(folder: str, settings: dict[str, Any]) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)).to(torch.bfloat16)
    model.cpu().save_pretrained(folder)


def lengths_of(options: argparse.Namespace) -> list[int]:
    """The prompts' lengths, further apart than NEW_TOKENS."""
    return [length for length in LENGTHS if length <= options.longest]


def serve_one(options: argparse.Namespace) -> None:
    """The child's part: one engine, one batch, its logprobs as JSON in ``options.out``."""
    import random

    import sglang

    source = random.Random(3)
    prompts = [[source.randrange(MODEL["vocab_size"]) for _ in range(length)] for length in lengths_of(options)]
    more = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in options.engine)}
    settings = dict(attention_backend=options.one, kv_cache_dtype=options.kv, page_size=options.page_size)
    settings["nccl_port"] = options.port  # engines that start together would take the same free one
    engine = sglang.Engine(model_path=options.model, **{**ENGINE, **settings, **more})
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    engine.generate(input_ids=prompts[:2], sampling_params={**sampling, "max_new_tokens": 2})
    engine.collective_rpc("hpc_forced_report", path=options.out)
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    engine.collective_rpc("hpc_forced_report", path=options.out)
    seen = json.loads(pathlib.Path(options.out).read_text())
    seen["tokens"] = [answer["output_ids"] for answer in answers]
    pathlib.Path(options.out).write_text(json.dumps(seen))
    engine.shutdown()


def start(
    backend: str, kv: str, model: str, folder: str, port: int, options: argparse.Namespace
) -> tuple[Any, str]:  # fmt: skip
    out = str(pathlib.Path(folder, f"{backend}-{kv}.json"))
    paths = os.pathsep.join(filter(None, (str(HERE / "probe"), os.environ.get("PYTHONPATH"))))
    arguments = [f"--engine={pair}" for pair in options.engine]
    command = [sys.executable, __file__, f"--one={backend}", f"--kv={kv}", f"--model={model}", f"--out={out}"]
    command += [f"--page-size={options.page_size}", f"--longest={options.longest}", f"--port={port}"]
    command += arguments
    log = open(f"{out}.log", "w")  # noqa: SIM115, the child's
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=log, stderr=log), out


def mean_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Mean over requests and steps of |difference| of the forced token's logprob."""
    return sum(abs(one["at"][position] - other["at"][position]) for position in one["at"]) / len(one["at"])


def check_complete(name: str, seen: dict[str, Any], lengths: list[int]) -> None:
    """Index the logprobs by position; every token of every request is there, and is a number."""
    seen["at"] = {int(position): forced for position, forced, _ in seen["rows"]}
    wanted = {length - 1 + step for length in lengths for step in range(NEW_TOKENS)}
    if set(seen["at"]) != wanted or len(seen["rows"]) != len(wanted):
        raise RuntimeError(f"{name}: expected {len(wanted)} tokens, got {len(seen['rows'])}")
    if any(value != value for row in seen["rows"] for value in row):
        raise RuntimeError(f"{name}: a logprob is NaN")


def compare(kv: str, seen: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """Lines of the table for one KV dtype, and whether the bound holds."""
    others = [name for name in seen if name != "hpc"]
    lines, good = [], True
    between = mean_difference(seen[others[0]], seen[others[-1]])
    lines.append(f"{kv:10s} {others[0]:>12s} - {others[-1]:12s} {between:9.5f}")
    for other in others if "hpc" in seen else ():
        ours = mean_difference(seen["hpc"], seen[other])
        if len(others) == 1:  # nothing to hold it against
            lines.append(f"{kv:10s} {'hpc':>12s} - {other:12s} {ours:9.5f}")
            continue
        held = ours <= BOUND * between
        good &= held
        said = "held" if held else "PASSED THE BOUND"
        lines.append(f"{kv:10s} {'hpc':>12s} - {other:12s} {ours:9.5f}  {ours / between:5.2f} of {BOUND}  {said}")
    calls = seen.get("hpc", {}).get("calls", {})
    if "hpc" in seen and not calls.get("attention.decode"):
        good = False
        lines.append(f"{kv:10s} hpc_attention was not called: {calls}")
    return lines, good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="two others and hpc; default triton, fa3, hpc")
    parser.add_argument("--kv-cache-dtype", action="append", help="default auto (bf16) and fp8_e4m3")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=JSON", help="more engine arguments")
    parser.add_argument("--settings", default="{}", help="JSON, changes to the model's configuration")
    parser.add_argument("--longest", type=int, default=1 << 20, help="leave out longer prompts")
    parser.add_argument("--port", type=int, default=28761, help="first of the engines' own")
    for hidden in ("--one", "--kv", "--model", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        serve_one(options)
        return
    backends = options.backend or ["triton", "fa3", "hpc"]
    begin = time.perf_counter()
    table, good = [], True
    with tempfile.TemporaryDirectory() as folder:
        model = str(pathlib.Path(folder, "model"))
        make_checkpoint(model, {**MODEL, **json.loads(options.settings)})
        print(f"checkpoint: {time.perf_counter() - begin:.0f} s", flush=True)
        asked = [(kv, backend) for kv in options.kv_cache_dtype or ["auto", "fp8_e4m3"] for backend in backends]
        children = {
            (kv, backend): start(backend, kv, model, folder, options.port + 10 * number, options)
            for number, (kv, backend) in enumerate(asked)
        }
        seen: dict[str, dict[str, dict[str, Any]]] = {}
        for (kv, backend), (child, out) in children.items():
            if child.wait():
                good = False
                print(f"{backend} {kv}: failed\n{pathlib.Path(out + '.log').read_text()[-3000:]}", flush=True)
                continue
            answers = seen.setdefault(kv, {})
            answers[backend] = json.loads(pathlib.Path(out).read_text())
            check_complete(f"{backend} {kv}", answers[backend], lengths_of(options))
            for line in pathlib.Path(out + ".log").read_text().splitlines():
                if "hpc-sglang: attention" in line:
                    print(line, flush=True)
            print(f"{backend} {kv}: {time.perf_counter() - begin:.0f} s", flush=True)
            if len(answers) == len(backends):
                lines, held = compare(kv, answers)
                print("\n".join(lines), flush=True)
                table, good = table + lines, good and held
    print("\nKV cache   pair                          mean |difference| of logprobs, times the others'")
    print("\n".join(table), flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
