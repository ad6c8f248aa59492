"""benchmarks/serving.py with engines that are not there: what is asked of whom, what is kept, what a failure leaves."""

import argparse
import json
import pathlib
import sys
from types import ModuleType
from typing import Any

import pytest
from hpc_common.testing import load_script

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
CHILD = """
import json, os, sys
waves, GROWING = 0, int(os.environ.get("GROWING", 0))
given = json.loads(sys.argv[1])
assert ("probe_memory" in os.environ.get("PYTHONPATH", "")) == ("SGLANG_PLUGINS" not in os.environ)
name = given["arguments"]["attention_backend"]
print(json.dumps({"row": "start", "seconds": 1.5}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command.get("row") == "8x1K" and name == "fa3":
        sys.exit("the engine's last words")
    requests = len(command.get("lengths", []))
    for slower in (9, 1, 3):  # what SGLang logs; the first line holds a prefill
        rate = 250 * requests / slower
        said = f"[t] Decode batch, #running-req: {requests}, a: 1, gen throughput (token/s): {rate:.2f}, b"
        print(said, file=sys.stderr)
    sys.stderr.flush()
    reply = {"row": command["row"], "asked": command}
    if command["do"] == "soak":
        waves = waves + 1
        held = {"allocated": 1000 + waves, "reserved": 5000 * waves, "moe.workspace": GROWING * waves}
        reply.update(requests=command["count"], prompt_tokens=10, tokens=7, seconds=1.5, memory=held)
    else:
        reply["tpot_ms"] = 2.0
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def serving(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = load_script(BENCHMARKS / "serving.py", "serving")
    (tmp_path / "serving_child.py").write_text(CHILD)
    monkeypatch.setattr(module, "HERE", tmp_path)
    return module


def asked(serving: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[list[dict[str, Any]], int]:
    """Rows of a run with these arguments, and the exit status."""
    kept: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(serving, "write_results", lambda path, document: kept.append(list(document["rows"])))
    monkeypatch.setattr(sys, "argv", ["serving.py", "--json", "out.json", *arguments])
    monkeypatch.setattr(serving, "document", dict)
    status = 0
    try:
        serving.main()
    except SystemExit as end:
        status = end.code
    assert all(len(earlier) <= len(later) for earlier, later in zip(kept, kept[1:], strict=False)) and len(kept) > 1
    return kept[-1], status


@pytest.mark.parametrize("together", [(), ("--together",)], ids=["in turns", "together"])
def test_rows_of_two_backends(together: tuple[str, ...], serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, status = asked(serving, monkeypatch, *together, "--row", "1x1K", "--row", "azure", "--soak", "9")
    assert status == 0
    names = [(row["backend"], row["row"]) for row in rows]
    assert names == [
        ("hpc", "start"), ("hpc", "1x1K"), ("hpc", "azure"), ("hpc", "soak 2"),
        ("default", "start"), ("default", "1x1K"), ("default", "azure"),
    ]  # fmt: skip
    azure = rows[2]["asked"]
    assert len(azure["lengths"]) == 64 and azure["tokens"] == 64 and azure["do"] == "row"
    assert "| 1x1K | 4.00 | 4.00 |" in serving.table(rows, "step_ms")


def test_a_soak_is_one_row_of_its_waves(
    serving: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, status = asked(serving, monkeypatch, "--soak", "250", "--row", "1x1K", "--soak", "50", "--together")
    assert status == 0
    names = [(row["backend"], row["row"]) for row in rows]
    ours = ["start", "soak 0", "1x1K", "soak 2"]
    assert names == [*(("hpc", name) for name in ours), ("default", "start"), ("default", "1x1K")]
    first, second = rows[1], rows[3]
    assert (first["requests"], first["waves"], first["tokens"], first["seconds"]) == (250, 3, 21, 4.5)
    assert [held["allocated"] for held in first["memory"]] == [1001, 1002, 1003]
    assert first["grew"] == {"allocated": 2, "reserved": 10000, "moe.workspace": 0}
    assert "requests 250, " in capsys.readouterr().out
    assert (second["requests"], second["waves"], second["grew"]["allocated"]) == (50, 1, 0)


def test_a_workspace_that_grows_is_a_failure(
    serving: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GROWING", "1")
    _, status = asked(serving, monkeypatch, "--backend", "hpc", "--soak", "300")
    assert status == 1 and "hpc soak 0: moe.workspace grew by 2 bytes" in capsys.readouterr().out
    grew = {"allocated": 1 << 24, "reserved": 1 << 40, "attention.tables": 1 << 24, "attention.plans": 0}
    assert serving.grown([{"backend": "hpc", "row": "soak", "grew": grew}]) == []
    for name in ("allocated", "attention.tables", "attention.plans"):
        more = {**grew, name: grew[name] + 1}
        assert len(serving.grown([{"backend": "hpc", "row": "soak", "grew": more}])) == 1


def test_rows_wait_for_another_job(
    serving: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first file is there after two waves, the second one when the rows have waited for it."""
    one, two = tmp_path / "one", tmp_path / "two"
    asks, ask, slept = [], serving.Child.ask, []

    def first_file_after_two(child: Any, **command: Any) -> bool:
        asks.append((child.backend, command["row"]))
        if len(asks) == 2:
            one.touch()
        return ask(child, **command)

    def second_file(seconds: float) -> None:
        slept.append(len(asks))
        two.touch()

    monkeypatch.setattr(serving.Child, "ask", first_file_after_two)
    monkeypatch.setattr(serving.time, "sleep", second_file)
    waits = ["--wait", str(one), "--wait", str(two)]
    rows, status = asked(serving, monkeypatch, "--together", "--soak", "900", *waits, "--row", "1x1K")
    assert status == 0 and slept == [2]
    assert asks == [("hpc", "soak 0"), ("hpc", "soak 0"), ("hpc", "1x1K"), ("default", "1x1K")]
    assert rows[1]["requests"] == 200
    assert [line for line in capsys.readouterr().out.splitlines() if "waiting" in line] == [
        f"waiting for {one}", f"waiting for {two}"
    ]  # fmt: skip


def test_a_backend_that_fails_leaves_the_other_one_alone(
    serving: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, status = asked(serving, monkeypatch, "--together", "--row", "1x1K", "--row", "8x1K", "--row", "32x1K")
    assert status == 1
    assert [row["row"] for row in rows if row["backend"] == "hpc"] == ["start", "1x1K", "8x1K", "32x1K"]
    theirs = [row for row in rows if row["backend"] == "default"]
    assert [row["row"] for row in theirs] == ["start", "1x1K", "failed"] and "last words" in theirs[-1]["log"]
    assert "last words" in capsys.readouterr().out


def test_the_step_of_a_whole_batch(serving: ModuleType) -> None:
    line = "[t] Decode batch, #running-req: {}, #token: 9, gen throughput (token/s): {}, #queue-req: 0"
    log = "\n".join(line.format(*pair) for pair in ((8, 100.0), (8, 1000.0), (7, 9000.0), (8, 0.0)))
    assert serving.step_ms(log, 8) == 8.0
    assert serving.step_ms(log, 3) is None


def test_each_engine_has_a_port_of_its_own(serving: ModuleType) -> None:
    options = argparse.Namespace(engine=["page_size=1", 'log_level="info"'], config=None, traces=None)
    ports = set()
    for backend in serving.BACKENDS:
        child = serving.Child(backend, options)
        given = json.loads(child.process.args[-1])["arguments"]
        ports.add(given["nccl_port"])
        assert given["page_size"] == 1 and given["log_level"] == "info"
        child.end()
    assert len(ports) == len(serving.BACKENDS)
