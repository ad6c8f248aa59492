"""The child of serving.py: one engine, and the commands that its parent asks of it, one JSON line each.

    python3 serving_child.py '{"arguments": {...}, "config": {...}}'      # replies are JSON lines too

A command is {"do": "row" | "profile" | "soak", ...}; {"row": "start"} is said when the engine is up. What SGLang prints
goes to stderr.
"""

import glob
import json
import math
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
from typing import Any


class Server:
    """One engine, with random prompts."""

    def __init__(self, arguments: dict[str, Any], config: dict[str, Any]) -> None:
        import sglang

        folder = tempfile.mkdtemp()
        pathlib.Path(folder, "config.json").write_text(json.dumps(config))
        self.vocabulary = config["vocab_size"]
        self.random = random.Random(0)
        start = time.perf_counter()
        self.engine = sglang.Engine(model_path=folder, **arguments)
        self.start_s = time.perf_counter() - start

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        return [self.random.choices(range(self.vocabulary), k=length) for length in lengths]

    def seconds(self, prompts: list[list[int]], new_tokens: int, behind: int = 0) -> float:
        """How long a batch takes from its arrival to its last token; ``behind`` a prompt of that many new tokens.

        Requests arrive one by one. While the GPU has that long prompt, all of them do, so that they decode together.
        """
        wanted = [new_tokens] * len(prompts)
        if behind:
            prompts, wanted = [*self.prompts([behind]), *prompts], [1, *wanted]
        sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in wanted]
        start = time.perf_counter()
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        end = time.perf_counter()
        made = [len(answer["output_ids"]) for answer in answers]
        if made != wanted:
            raise RuntimeError(f"asked for {new_tokens} tokens of each request, got {made}")
        return end - start

    def row(self, row: str, lengths: list[int], tokens: int, repeats: int, behind: int) -> dict[str, Any]:
        """TTFT of prompts never seen before, then TPOT of prompts in the prefix cache."""
        self.engine.flush_cache()
        self.seconds(self.prompts(lengths), 4)  # kernels are compiled and tuned for these sizes
        self.engine.flush_cache()
        prompts = self.prompts(lengths)
        ttft = self.seconds(prompts, 1)
        first, whole = [], []
        for _ in range(repeats):
            first.append(self.seconds(prompts, 1, behind))
            whole.append(self.seconds(prompts, tokens, behind))
        one, total = statistics.median(first), statistics.median(whole)
        return {
            "row": row,
            "requests": len(lengths),
            "prompt_tokens": sum(lengths),
            "new_tokens": tokens,
            "tpot_ms": 1e3 * (total - one) / (tokens - 1),
            "tpot_least_ms": 1e3 * (min(whole) - min(first)) / (tokens - 1),
            "ttft_ms": 1e3 * ttft,
            "tokens_per_s": len(lengths) * tokens / (ttft + total - one),
        }

    def profile(self, row: str, lengths: list[int], tokens: int, behind: int, folder: str | None) -> dict[str, Any]:
        """Where a decode step's time goes (``step_times``). folder: keeps the trace."""
        from step_times import breakdown

        prompts = self.prompts(lengths)
        self.seconds(prompts, 2)
        with tempfile.TemporaryDirectory() as temporary:
            kept = folder or temporary
            before = set(glob.glob(f"{kept}/*.trace.json.gz"))
            self.engine.start_profile(output_dir=kept, activities=["CPU", "GPU"], with_stack=False, record_shapes=False)
            self.seconds(prompts, tokens, behind)
            self.engine.stop_profile()
            (found,) = set(glob.glob(f"{kept}/*.trace.json.gz")) - before
            return {"row": f"profile {row}", "step": breakdown(found)}

    def soak(self, row: str, count: int, longest: int) -> dict[str, Any]:
        """A wave of ``count`` requests of mixed lengths, handed over at once; raises where one is not as asked."""
        lengths = [int(math.exp(self.random.uniform(math.log(8), math.log(longest)))) for _ in range(count)]
        wanted = [self.random.randint(4, 200) for _ in range(count)]
        start = time.perf_counter()
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
        return {"row": row, "requests": count, "prompt_tokens": sum(lengths), "seconds": seconds,
                "tokens": sum(wanted), "memory": self.memory()}  # fmt: skip

    def memory(self) -> dict[str, int]:
        """Bytes that the first scheduler's process holds on the GPU (``probe_memory``)."""
        with tempfile.NamedTemporaryFile("r") as file:
            self.engine.collective_rpc("hpc_memory_report", path=file.name)
            return json.load(file)


def main() -> None:
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(entry: dict[str, Any]) -> None:
        print(json.dumps(entry), file=reply, flush=True)

    given = json.loads(sys.argv[1])
    server = Server(given["arguments"], given["config"])
    say({"row": "start", "seconds": server.start_s})
    for line in sys.stdin:
        command = json.loads(line)
        say(getattr(server, command.pop("do"))(**command))
    server.engine.shutdown()


if __name__ == "__main__":
    main()
