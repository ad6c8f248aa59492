"""benchmarks/moe.py on a CPU, with a small layer: which rows it makes where a peer fails. Times need a GPU."""

import sys
from pathlib import Path
from types import ModuleType

import hpc_moe
import pytest
import torch
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
