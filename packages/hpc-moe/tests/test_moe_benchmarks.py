"""benchmarks/moe.py and launches.py on a CPU, with a small layer: which rows they make. Times need a GPU."""

import sys
from pathlib import Path
from types import ModuleType

import hpc_moe
import pytest
import torch
from hpc_common import timing
from hpc_common.testing import load_script

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "peers", raising=False)
    module = load_script(BENCHMARKS / "moe.py", "moe_benchmark")
    monkeypatch.setattr(module, "SHAPES", (module.Shape("small", 8, 8, 8, 128, 128, (2, 3)),))
    return module


def test_a_peer_that_fails_loses_no_other_row(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def right(x, w13, w2, ids, topk_weights, quant) -> torch.Tensor:
        return hpc_moe.fused_moe(x, w13, w2, ids, topk_weights, quant)

    def raises(*tensors) -> torch.Tensor:
        raise AssertionError("group is not initialized")

    def wrong(*tensors) -> torch.Tensor:
        return right(*tensors) * 2

    times_called = 0

    def raises_when_timed(*tensors) -> torch.Tensor:
        nonlocal times_called
        times_called += 1
        if times_called > 1:
            raise MemoryError("not under capture")
        return right(*tensors)

    def find(op: str, intermediate: int, local: bool) -> tuple[dict, list[str]]:
        found = {"A": raises, "B": right, "C": wrong, "D": raises_when_timed}
        return {name: (peer, False) for name, peer in found.items()}, ["E: not installed"]

    monkeypatch.setattr(bench.peers, "find", find)
    rows = bench.run(("moe-tensor",), "m=2", device="cpu", with_peers=True)
    assert [(row.case, row.provider) for row in rows] == [("small m=2", "ours"), ("small m=2", "B")]
    said = capsys.readouterr().out
    assert "A failed: AssertionError: group is not initialized" in said
    assert "C: " in said and "from ours, not timed" in said
    assert "D failed: MemoryError: not under capture" in said
    assert "E: not installed" in said


def test_peers_that_cannot_take_a_row_say_so(bench: ModuleType) -> None:
    """SGLang is not imported here: to use it makes process groups, which other tests of this process would meet."""
    found, missing = bench.peers.find("moe-block", 192, True)
    assert not found
    assert [reason.partition(":")[0] for reason in missing] == ["torch grouped", "SGLang Triton"]
    assert bench.peers.find("moe-tensor", 128, False) == ({}, ["no peer: ids of other ranks"])


def test_several_cases_and_the_most_tokens(bench: ModuleType) -> None:
    def cases(*arguments: object, **options: object) -> list[str]:
        return [row.case for row in bench.run(("moe-block",), *arguments, device="cpu", **options)]

    assert cases("m=3,m=2") == ["small m=2", "small m=3"] and cases("m=3,m=4") == ["small m=3"]
    assert cases(most=2) == ["small m=2"]
    rows = bench.run(("moe-bf16",), most=2, device="cpu", with_bf16=True)  # whose activations are bf16 anyway
    assert [(row.op, row.provider) for row in rows] == [("moe-bf16", "ours")]


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import moe
moe.SHAPES = (moe.Shape("small", 8, 8, 8, 128, 128, (2, 3)),)
from launches import cases
"""


@pytest.fixture
def launches(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "moe", bench)
    monkeypatch.delitem(sys.modules, "by_turns", raising=False)
    module = load_script(BENCHMARKS / "launches.py", "moe_launches")
    monkeypatch.setattr(module, "device", lambda: "cpu")
    counts = iter(range(1, 9))
    monkeypatch.setattr(module, "kernels", lambda call: next(counts))
    return module


def test_launches_with_pdl_and_without(launches: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "cases.py"
    script.write_text(SCRIPT.format(folder=str(BENCHMARKS)))
    rows = launches.run("m=2", rounds=1, replays=1, script=str(script))
    assert [(row.op, row.case, row.provider, row.kernels, row.kernels_bf16_x) for row in rows] == [
        (op, "small m=2", provider, kernels, kernels + 1)
        for op, kernels in (("moe-tensor", 1), ("moe-block", 3))
        for provider in ("ours", "ours without PDL")
    ]
    assert all(row.us > 0 for row in rows)
    assert timing.results(rows, {}, "cpu")["rows"][3]["kernels_bf16_x"] == 4  # what figures.py reads


def test_launches_that_differ_are_no_rows(launches: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Build:
        def __init__(self, *arguments: str) -> None:
            self.ended = False

        def read(self) -> dict:
            return {}

        def end(self) -> None:
            self.ended = True

    monkeypatch.setattr(launches.by_turns, "Build", Build)
    monkeypatch.setattr(launches.by_turns, "measure_case", lambda *_: ({"ours": 1.0}, ["    ours: 5, without: 6"]))
    with pytest.raises(RuntimeError, match="moe-tensor small m=2.*ours: 5"):
        launches.run("m=2")
