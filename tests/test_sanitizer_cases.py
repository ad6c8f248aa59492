"""The calls that run under sanitizers reach every kernel: by the Configs that they get."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hpc_attention._C
import hpc_moe._C
import hpc_router_gemm._C
import pytest

FOLDER = Path(__file__).parent / "sanitizer"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of the folder's modules, which know each other by bare names."""
    names = ("device", "attention", "moe", "router")
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("small", [False, True])
def test_every_compiled_router_tile(load: Any, small: bool) -> None:
    core: ModuleType = hpc_router_gemm._C
    cases = [case for case in load("router").cases(core) if not (small and case.large)]
    reached = {
        (f["kernel"], f["rows"], f.get("k_groups", 1), f["tokens"], f.get("presplit", False), f.get("paired", False))
        for f in (case.fields for case in cases if getattr(case, "fields", None))
    }
    assert {("stream", rows, 1, tokens, False, False) for rows, tokens in core.STREAM_TILES} <= reached
    kinds = ((core.WGMMA_TILES, False, False), (core.TERM_TILES, True, False), (core.PAIRED_TILES, True, True))
    for tiles, presplit, paired in kinds:
        assert {("tile", *tile, presplit, paired) for tile in tiles} <= reached
    assert any(getattr(case, "fields", {}).get("pairs_experts") for case in cases)
    splits = {
        (f["kernel"], f["split"] > 1, f.get("sums_apart", False)) for f in (getattr(c, "fields", 0) for c in cases) if f
    }
    assert splits == {("stream", False, False), ("stream", True, False)} | {
        ("tile", *kind) for kind in ((False, False), (True, False), (True, True))
    }
    assert {case.m for case in cases if not hasattr(case, "fields")} == {3, 300}  # choices by 4 warps and by 2


@pytest.mark.parametrize("small", [False, True])
def test_every_kind_of_moe_kernel(load: Any, small: bool) -> None:
    """Racecheck's cases too, but for calls that are several of what others are one of."""
    moe = load("moe")
    found = set()
    for case in moe.cases(hpc_moe._C):
        if small and case.large:
            continue
        config = hpc_moe._C.make_config(
            num_tokens=case.tokens, top_k=case.top_k, num_local_experts=case.experts,
            num_experts=case.experts * case.ranks, hidden=case.hidden, intermediate=case.inter, quant=case.quant,
            x_is_bf16=case.bf16_x, batch_invariant=case.invariant, num_sms=moe.NUM_SMS,
        )  # fmt: skip
        kind = "few" if config.few else f"{config.regime}{' exact' if config.exact else ''} {config.rule[0]}"
        found |= {(case.quant, kind), (case.quant, f"group {config.act_group}"), ("chunks", config.num_chunks)}
        found |= {(case.quant, "panels" if config.panel_columns < case.hidden else "one panel")}
        found |= {(case.quant, "index", config.index_ctas)}
    for quant in ("tensor", "block"):
        kinds = ("few", "low 8", "mid exact 32", "mid exact 64", "mid exact 128", "large exact 128")
        kinds += () if small else ("panels",)
        kinds += ("mid 32", "mid 64", "mid 128", "large 128", "group 64", "group 128", "one panel")
        assert {(quant, kind) for kind in kinds} <= found
        assert {(quant, "index", ctas) for ctas in (0, 1, 8)} <= found
    assert {("tensor", "large 96"), ("none", "mid 128"), ("none", "large 128")} <= found
    assert small or ("chunks", 2) in found


@pytest.mark.parametrize("small", [False, True])
def test_every_kind_of_attention_problem(load: Any, small: bool) -> None:
    attention = load("attention")
    cases = [case for case in attention.cases(hpc_attention._C) if not (small and case.large)]
    kinds = {(case.kv, case.query) for case in cases}
    assert kinds == {(0, 0), (1, 1), (2, 0), (2, 1), (2, 2)}
    for kind in kinds:
        mine = [case for case in cases if (case.kv, case.query) == kind]
        assert {case.head_dim for case in mine} == {64, 128, 256} and any(case.invariant for case in mine)
        rows = {case.q_len * case.num_q_heads // case.num_kv_heads for case in mine if case.head_dim == 128}
        assert {4, 16, 24, 128} <= rows
    alone = {
        (case.kv, case.num_kv_heads, case.sinks) for case in cases if case.num_ctas == 0 and len(case.lengths) == 1
    }
    assert alone == {(kv, heads, sinks) for kv in (0, 2) for heads in (1, 8) for sinks in (False, True)}
