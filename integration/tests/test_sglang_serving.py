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
import json, sys
given = json.loads(sys.argv[1])
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
    print(json.dumps({"row": command.get("row", command["do"]), "tpot_ms": 2.0, "asked": command}), flush=True)
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
        ("hpc", "start"), ("hpc", "1x1K"), ("hpc", "azure"), ("hpc", "soak"),
        ("default", "start"), ("default", "1x1K"), ("default", "azure"),
    ]  # fmt: skip
    azure = rows[2]["asked"]
    assert len(azure["lengths"]) == 64 and azure["tokens"] == 64 and azure["do"] == "row"
    assert "| 1x1K | 4.00 | 4.00 |" in serving.table(rows, "step_ms")


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
