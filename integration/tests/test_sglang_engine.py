"""The real SGLang engine on a CPU with this package's plugin: greedy tokens are transformers' own.

Every case is an engine of its own: a launcher, a scheduler and a detokenizer process, as SGLang starts them, four
requests at a time out of eight of mixed lengths, prompts cut into chunks of 64 tokens, then a round that continues
prompts of the first one from the radix cache. What the scheduler's process counted shows which operators ran.

An engine spends most of its time on starting, on one core. So the cases of a session run ahead, from its start on and
the last first, while other tests do (``Ahead``); a test whose case has not begun runs it itself.
"""

import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from typing import Any

import pytest

HERE = pathlib.Path(__file__).parent / "engine"
CHUNK = 64
# bf16 rounds logits of this size by 2^-6, and hidden states on the way to them: a first choice that leads by less may
# be another one in an engine that adds up in another order. So may experts, whose close calls the answers don't show.
CLOSE_CALL = 0.15
WITH_EXPERTS = ("qwen3-moe", "hunyuan-v3", "laguna")

# model -> page size
MODELS = {"qwen3": 1, "qwen3-moe": 16, "hunyuan-v3": 64, "laguna": 16}
# Older versions keep their books by Triton kernels on a CPU too.
INTERPRETED = {"TRITON_INTERPRET": "1"}
ENVIRONMENT = INTERPRETED if metadata.version("sglang") == "0.5.17" else {}
ARGS = dict(attention_backend="hpc", max_running_requests=4, chunked_prefill_size=CHUNK)


class Driver:
    """The process of ``engine/driver.py``, started anew after a case that ended it (SGLang kills its launcher where a
    scheduler fails)."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        self.process: subprocess.Popen[str] | None = None
        self.lock, self.stopped = threading.Lock(), False  # no process is started beside stop(), or behind it

    def run(self, model: str, **case: Any) -> dict[str, Any]:
        """What the driver answers, and its process as "launcher"; an AssertionError with the end of the log where that
        is an error."""
        with self.lock:
            assert not self.stopped, "the session has ended"
            if self.process is None or self.process.poll() is not None:
                paths = os.pathsep.join(filter(None, (str(HERE / "site"), os.environ.get("PYTHONPATH"))))
                self.process = subprocess.Popen(
                    [sys.executable, str(HERE / "driver.py"), str(os.getpid())], text=True, stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=self.log.open("a"), env={**os.environ, "PYTHONPATH": paths},
                    start_new_session=True,
                )  # fmt: skip
        case = {"model": model, "folder": str(self.folder / model), **case}
        pathlib.Path(case["folder"]).mkdir(exist_ok=True)
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        result = json.loads(line) if line else {"error": "the launcher's process ended"}
        if "error" in result:
            raise AssertionError(f"{result['error']}\n{self.log.read_text()[-4000:]}")
        return {**result, "launcher": self.process.pid}

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()


def greedy(driver: Driver, model: str) -> dict[str, Any]:
    update = {"update": str(driver.folder / "another gate")} if model == "hunyuan-v3" else {}
    return driver.run(model, args={**ARGS, "page_size": MODELS[model]}, environment=ENVIRONMENT, **update)


def longcat(driver: Driver) -> dict[str, Any]:
    """Its attention (MLA) stays SGLang's. Its zero experts are a Triton kernel."""
    args = {**ARGS, "attention_backend": "torch_native", "page_size": 1}
    theirs = driver.run("longcat-flash", args=args, environment={**INTERPRETED, "HPC_SGLANG_ROUTER": "0"})
    return {"theirs": theirs, "ours": driver.run("longcat-flash", args=args, environment=INTERPRETED)}


def stream(driver: Driver) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return driver.run("qwen3", args=dict(attention_backend="hpc", page_size=32), port=port)


CASES: dict[str, Callable[[Driver], dict[str, Any]]] = {
    **{model: functools.partial(greedy, model=model) for model in MODELS},
    "longcat-flash": longcat,
    "http": stream,
}


class Ahead:
    """Runs cases of CASES on a thread with a driver of its own; ``result`` takes one that has not begun to another."""

    def __init__(self) -> None:
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.thread = ThreadPoolExecutor(1)
        self.drivers: list[Driver] = []
        self.futures: dict[str, Future[dict[str, Any]]] = {}

    def start(self, names: list[str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="engines")
        for kind in ("ahead", "tests"):
            folder = pathlib.Path(self.folder.name, kind)
            folder.mkdir()
            self.drivers.append(Driver(folder))
        for name in reversed(names):
            self.futures[name] = self.thread.submit(CASES[name], self.drivers[0])

    def result(self, name: str) -> dict[str, Any]:
        future = self.futures[name]
        return CASES[name](self.drivers[1]) if future.cancel() else future.result()

    def stop(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        for driver in self.drivers:
            driver.stop()
        if self.folder is not None:
            self.folder.cleanup()


ahead = Ahead()  # conftest.py starts it with what the session's tests are marked with, and stops it


def check_tokens(model: str, result: dict[str, Any]) -> None:
    """Greedy tokens are transformers' own, but for close calls: at most two requests of twelve part from them."""
    same = total = parted = 0
    rounds = zip(result["tokens"], result["got"], result["leads"], strict=True)
    for number, round_ in enumerate(rounds):
        for request, (want, got, leads) in enumerate(zip(*round_, strict=True)):
            assert len(got) == len(want)
            total += len(want)
            step = next((step for step in range(len(want)) if want[step] != got[step]), len(want))
            same += step
            if step < len(want):
                parted += 1
                close = leads[step] < CLOSE_CALL or model in WITH_EXPERTS
                assert close, f"round {number}, request {request}, token {step}: {want}, got {got}"
    assert parted <= 2 and same >= 0.9 * total, f"{same} of {total} tokens; {result['tokens']}, got {result['got']}"


def check_update(updated: dict[str, Any], before: list[list[int]]) -> None:
    """Answers are those of the new gate, which differ from the old one's in every request, but for close calls."""
    assert updated["done"], updated["message"]
    pairs = list(zip(updated["got"], updated["tokens"], before, strict=True))
    assert sum(got == new for got, new, _ in pairs) >= 6 and not any(got == old for got, _, old in pairs), pairs


@pytest.mark.parametrize("model", [pytest.param(model, marks=pytest.mark.engine(model)) for model in MODELS])
@pytest.mark.timeout(600)
def test_greedy_tokens_are_transformers(model: str) -> None:
    page_size = MODELS[model]
    result = ahead.result(model)
    check_tokens(model, result)
    # The second round's prompts begin with 200, 130 and 150 tokens of the first's, the last with none.
    assert result["cached"] == [[0] * 8, [shared // page_size * page_size for shared in (200, 130, 150, 0)]]
    report = result["report"]
    assert report["pid"] not in (result["launcher"], os.getpid())
    calls = report["calls"]
    layers, plans = 2, 2 if model == "laguna" else 1
    # 545 prompt tokens in the first round alone, at most CHUNK of them in a step.
    assert calls["attention.prefill"] >= layers * (545 // CHUNK)
    # Every decode step updates each plan once, and both layers use them; 8 requests through 4 slots take 2 x 7 steps.
    assert calls["attention.decode"] * plans == calls["attention.update"] * layers
    assert calls["attention.decode"] >= layers * 2 * 7
    assert calls.get("attention.prologue", 0) == (calls["attention.decode"] if model == "qwen3-moe" else 0), calls
    assert bool(calls.get("router.gemm")) is (model == "hunyuan-v3"), calls
    assert bool(calls.get("router.route")) is (model == "qwen3-moe"), calls
    if model == "hunyuan-v3":
        check_update(result["updated"], result["got"][0])


@pytest.mark.engine("longcat-flash")
@pytest.mark.timeout(900)
def test_longcats_router_alone_is_ours() -> None:
    """The reference is SGLang's own router, in an engine without ours."""
    result = ahead.result("longcat-flash")
    theirs, ours = result["theirs"], result["ours"]
    assert ours["got"] == theirs["got"]
    assert len({tuple(answer) for round_ in ours["got"] for answer in round_}) == 12
    assert not theirs["report"]["calls"]
    calls = ours["report"]["calls"]
    assert calls["router.gemm"] and not any(name.startswith("attention.") for name in calls), calls


@pytest.mark.engine("http")
@pytest.mark.timeout(600)
def test_server_streams_over_http() -> None:
    result = ahead.result("http")
    *events, last = result["events"]
    assert last == "[DONE]" and len(events) > 1
    lengths = [len(json.loads(event)["output_ids"]) for event in events]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    want, leads = result["tokens"][0][4], result["leads"][0][4]
    got = json.loads(events[-1])["output_ids"]
    wrong = next((step for step, pair in enumerate(zip(want, got, strict=True)) if pair[0] != pair[1]), None)
    assert wrong is None or leads[wrong] < CLOSE_CALL


def test_a_driver_ends_with_the_session_that_started_it() -> None:
    """Whose end it does not see where a case keeps it, or as here where its input stays open."""
    inside, outside = os.pipe()
    starter = (
        "import os, subprocess, sys;"
        "command = [sys.executable, sys.argv[1], str(os.getpid())];"
        "print(subprocess.Popen(command, stdin=0, stdout=2, start_new_session=True).pid)"
    )
    started = subprocess.run(
        [sys.executable, "-c", starter, str(HERE / "driver.py")], stdin=inside, stdout=subprocess.PIPE, check=True
    )
    driver = pathlib.Path("/proc", started.stdout.decode().strip())
    try:
        for _ in range(200):
            if not driver.exists() or not (driver / "cmdline").read_bytes():  # what has ended has no command
                return
            time.sleep(0.1)
        os.killpg(int(driver.name), signal.SIGKILL)
        pytest.fail("the driver is still there")
    finally:
        os.close(inside)
        os.close(outside)


def test_a_driver_that_starts_beside_a_sessions_end_is_stopped(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, started = threading.Event(), []
    popen = subprocess.Popen

    def slow(command: list[str], **options: Any) -> subprocess.Popen[str]:
        begun.set()
        time.sleep(0.5)
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", slow)
    driver = Driver(tmp_path)
    with ThreadPoolExecutor(1) as thread:
        case = thread.submit(driver.run, "qwen3")
        begun.wait()
        driver.stop()
        assert started and started[0].poll() is not None
        assert case.exception(timeout=10) is not None
    with pytest.raises(AssertionError, match="has ended"):
        driver.run("qwen3")
