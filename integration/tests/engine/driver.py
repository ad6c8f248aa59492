"""Runs SGLang engines for the tests, in a process of its own: imports SGLang once, then serves one JSON case a line.

A case is {"model", "folder", "args", "environment"}: the checkpoint is made where ``folder`` has none, an engine with
``args`` starts, says every round of the checkpoint's prompts greedily, its scheduler reports what it counted, and the
engine ends. The reply is one JSON line: {"prompts", "tokens", "leads"} of ``checkpoints.prepare``, "got" and "cached"
as rounds of requests, "report" of the probe; or {"error"}. With "port", it is the command line's server instead, which
streams one request over HTTP: "events" are its lines. With "update", a folder, the engine is given the same model with
another gate before it ends: "updated" is what it says then, beside transformers. What SGLang prints goes to stderr.

It leads a process group, which ends with the process that started it, however that ended; its argument is that one's
number.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ALWAYS = dict(
    device="cpu", skip_tokenizer_init=True, sampling_backend="pytorch", grammar_backend="none", max_total_tokens=4096,
    disable_overlap_schedule=True, sleep_on_idle=True, log_level="info",
)  # fmt: skip


def answers(case: dict[str, Any]) -> dict[str, Any]:
    import checkpoints

    folder = pathlib.Path(case["folder"])
    made = folder / "answers.json"
    return json.loads(made.read_text()) if made.exists() else checkpoints.prepare(case["model"], folder)


def greedy(new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


def update(engine: Any, case: dict[str, Any], prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """The engine after an update of its weights from another checkpoint, beside transformers with that one."""
    import checkpoints

    folder = pathlib.Path(case["update"])
    want = checkpoints.with_another_gate(case["model"], folder, prompts)
    done, message, *_ = engine.update_weights_from_disk(str(folder))
    engine.flush_cache()
    answers = engine.generate(input_ids=prompts, sampling_params=greedy(new_tokens))
    return {"done": done, "message": message, "tokens": want, "got": [answer["output_ids"] for answer in answers]}


def run_engine(case: dict[str, Any]) -> dict[str, Any]:
    import sglang

    result = answers(case)
    engine = sglang.Engine(model_path=case["folder"], **{**ALWAYS, **case["args"]})
    try:
        new_tokens = len(result["tokens"][0][0])
        rounds = [engine.generate(input_ids=ids, sampling_params=greedy(new_tokens)) for ids in result["prompts"]]
        with tempfile.NamedTemporaryFile() as file:
            engine.collective_rpc("hpc_report", path=file.name)
            result["report"] = json.loads(pathlib.Path(file.name).read_text())
        if "update" in case:
            result["updated"] = update(engine, case, result["prompts"][0], new_tokens)
    finally:
        engine.shutdown()
    result["got"] = [[answer["output_ids"] for answer in round_] for round_ in rounds]
    result["cached"] = [[answer["meta_info"]["cached_tokens"] for answer in round_] for round_ in rounds]
    return result


def run_server_case(case: dict[str, Any]) -> dict[str, Any]:
    """The server as the command line starts it; one request streamed over HTTP."""
    result = answers(case)
    url = f"http://127.0.0.1:{case['port']}"
    settings = {**ALWAYS, **case["args"], "model_path": case["folder"], "port": case["port"]}
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in {**settings, "skip_server_warmup": True}.items()
    ]
    process = subprocess.Popen([sys.executable, "-m", "sglang.launch_server", *flags])
    try:
        wait(url, process)
        prompt = result["prompts"][0][4]
        body = {"input_ids": prompt, "sampling_params": greedy(len(result["tokens"][0][4])), "stream": True}
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as stream:
            lines = [line.decode().strip() for line in stream]
        result["events"] = [line.removeprefix("data: ") for line in lines if line]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    return result


def wait(url: str, process: Any, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise TimeoutError(f"no answer from {url}/health in {seconds:.0f} s")


def end_with(parent: int) -> None:
    """Kills this process's group when its parent is no longer there: killed, it can't have stopped what it started."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        case = json.loads(line)
        before = dict(os.environ)
        os.environ.update(case.get("environment", {}))
        try:
            result = run_server_case(case) if "port" in case else run_engine(case)
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        os.environ.clear()
        os.environ.update(before)
        print(json.dumps(result), file=reply, flush=True)


if __name__ == "__main__":
    main()
