"""The demo on a small layer: right operators pass, wrong ones are found, missing ones are named; the command's ends."""

import functools
import io
import json
import pathlib
import types
from collections.abc import Callable

import hpc_attention
import hpc_moe
import hpc_router_gemm
import pytest
import torch
from hpc_common import schedule as decode_schedule
from hpc_tools import checks, cli, demo, operators, picture, report, schedules, steps
from hpc_tools.checks import Check
from hpc_tools.demo import Batch, choose_batch, run
from hpc_tools.errors import InputError
from hpc_tools.layer import FP8, LayerShape, make_layer, random_e4m3
from hpc_tools.progress import BarProgress, Progress
from rich.console import Console

SMALL = LayerShape("small", 256, 4, 2, 64, 16, 8, 2, 64)
BATCH = Batch([300, 1, 0, 130, 700], "by hand")


def small(batch: Batch = BATCH, seed: int = 0) -> demo.Report:
    return run(batch, seed, Progress(), SMALL)


def shown(result: demo.Report) -> str:
    console = Console(file=io.StringIO(), width=100)
    report.show(result, console)
    return console.file.getvalue()


def test_small_layer_passes() -> None:
    result = small()
    names = ["DecodePlan.update", "decode", "router_gemm", "route", "fused_moe"]
    assert [outcome.operator for outcome in result.outcomes] == names
    assert result.ok and all(outcome.checks and outcome.device for outcome in result.outcomes)
    assert "All 5 results within tolerance" in shown(result)
    document = json.loads(json.dumps(report.as_json(result)))
    assert document["ok"] and document["batch"]["seq_lens"] == BATCH.lengths
    assert [entry["operator"] for entry in document["operators"]] == names
    assert set(document["build"]) == {package.distribution for package in operators.PACKAGES}


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [1], [64], [65] * 3, [5000]])
def test_edge_batches(lengths: list[int]) -> None:
    result = small(Batch(lengths, "edge"))
    assert result.ok
    assert "All 5 results" in shown(result)


def test_threads_are_as_before() -> None:
    threads = torch.get_num_threads()
    small()
    assert torch.get_num_threads() == threads


def drop_last_tile(real: Callable) -> Callable:
    """Decode with the longest request cut by 64 tokens."""

    def decode(q, k, v, table, plan, **options):  # noqa: ANN001, ANN202
        lengths = plan.host_map().requests["seq_len"][:-1].copy()
        lengths[lengths.argmax()] -= 64
        plan.update(torch.from_numpy(lengths))
        return real(q, k, v, table, plan, **options)

    return decode


def swapped_experts(real: Callable) -> Callable:
    def moe(x, w13, w2, ids, weights, **options):  # noqa: ANN001, ANN202
        return real(x, w13, w2, ids.flip(1), weights, **options)

    return moe


def wrong_scale(real: Callable) -> Callable:
    def moe(x, w13, w2, ids, weights, quant):  # noqa: ANN001, ANN202
        return real(x, w13, w2, ids, weights, quant=hpc_moe.Fp8Block(quant.w13_scale, quant.w2_scale.roll(1, 0)))

    return moe


def one_term(real: Callable) -> Callable:
    """Scores of the weight rounded to bf16: what two terms are there to better."""

    def router_gemm(x, w):  # noqa: ANN001, ANN202
        return real(x, hpc_router_gemm.RouterWeight(w.weight, terms=1))

    return router_gemm


def second_best(real: Callable) -> Callable:
    def route(x, w, k):  # noqa: ANN001, ANN202
        ids, weights = real(x, w, k + 1)
        return ids[:, 1:].contiguous(), weights[:, 1:] / weights[:, 1:].sum(1, keepdim=True)

    return route


def nan_somewhere(real: Callable) -> Callable:
    def moe(*arguments, **options):  # noqa: ANN002, ANN003, ANN202
        out = real(*arguments, **options)
        out[-1, -1] = float("nan")
        return out

    return moe


@pytest.mark.parametrize(
    ("module", "name", "fault", "operator"),
    [
        (hpc_attention, "decode", drop_last_tile, "decode"),
        (hpc_router_gemm, "router_gemm", one_term, "router_gemm"),
        (hpc_router_gemm, "route", second_best, "route"),
        (hpc_moe, "fused_moe", swapped_experts, "fused_moe"),
        (hpc_moe, "fused_moe", wrong_scale, "fused_moe"),
        (hpc_moe, "fused_moe", nan_somewhere, "fused_moe"),
    ],
)
def test_faults_are_found(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType, name: str, fault: Callable, operator: str
) -> None:
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    result = small()
    assert not result.ok
    assert [outcome.operator for outcome in result.outcomes if not outcome.ok] == [operator]
    assert f"Out of tolerance: {operator}." in shown(result)
    assert not json.loads(json.dumps(report.as_json(result)))["ok"]


def test_wrong_plan_is_found() -> None:
    """A map of other lengths is valid, but not this batch's; one changed byte is neither."""
    lengths = [300, 1, 0, 130, 700]
    host = decode_schedule.plan_decode(lengths, 2)
    assert all(check.ok for check in checks.plan(host, host, lengths))
    other = decode_schedule.plan_decode(lengths[::-1], 2)
    assert all(check.error > 0 for check in checks.plan(other, host, lengths))
    raw = bytearray(host.raw)
    raw[-1] ^= 1
    changed = checks.plan(decode_schedule.DecodeSchedule.from_map(raw), host, lengths)
    assert changed[0].error == 1 and not changed[1].ok


@pytest.mark.parametrize("absent", ["hpc_attention", "hpc_router_gemm", "hpc_moe"])
def test_missing_operator_is_named_and_the_rest_runs(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    entries = tuple(
        operators.Installed(entry.package, None, {}, "") if entry.package.module == absent else entry
        for entry in operators.installed()
    )
    monkeypatch.setattr(operators, "installed", lambda: entries)
    result = small()
    missing = [outcome for outcome in result.outcomes if not outcome.device]
    assert len(missing) == 1 and missing[0].note == f"{absent.replace('_', '-')} is not installed"
    assert result.ok and sum(bool(outcome.device) for outcome in result.outcomes) >= 3
    text = shown(result)
    assert f"Not run: {missing[0].operator}." in text and "is not installed" in text
    assert report.as_json(result)["operators"][result.outcomes.index(missing[0])]["device"] is None


def test_no_operator_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = tuple(operators.Installed(package, None, {}, "") for package in operators.PACKAGES)
    monkeypatch.setattr(operators, "installed", lambda: entries)
    result = small()
    assert not any(outcome.device for outcome in result.outcomes)
    assert "Not run: decode, route, fused_moe." in shown(result)
    assert result.comparison.num_ctas == 132


def test_check_is_strict() -> None:
    assert Check("x", 0.5, 0.5).ok and not Check("x", 0.51, 0.5).ok and not Check("x", float("nan"), 0.5).ok


def test_schedules_are_compared_on_the_same_tiles() -> None:
    lengths = [128 * 1024] + [4096] * 31
    comparison = schedules.compare(decode_schedule.plan_decode(lengths, 1, 132), lengths)
    tiles = sum(length // 64 for length in lengths)
    assert comparison.total_tiles == tiles and comparison.lower_bound == -(-tiles // 132)
    assert [sum(schedule.loads) for schedule in comparison.schedules] == [tiles] * 3
    assert all(len(schedule.loads) == 132 for schedule in comparison.schedules)
    dynamic, by_count, by_size = comparison.schedules
    assert comparison.lower_bound == 31 and dynamic.largest == comparison.floor == 32
    assert dynamic.largest <= by_size.largest < by_count.largest
    assert by_count.largest >= -(-2048 // 5) and "5 pieces" in by_count.name
    assert by_size.pieces == tiles // 8 and "512 tokens" in by_size.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": "-5"}, "--lengths: expected terms such as 30x4K joined by \\+, got '-5' .no length is negative."),
        ({"lengths": ""}, "--lengths: expected terms"),
        ({"lengths": "0x4K"}, "--lengths: expected 1 to 4096 requests, got 0"),
        ({"lengths": "5000x1"}, "--lengths: expected 1 to 4096 requests, got 5000"),
        ({"lengths": "99999999x1"}, "--lengths: expected 1 to 4096 requests, got 99999999"),
        ({"lengths": "9" * 6000}, "--lengths: expected terms of at most 64 characters, got '9{12}[.]{3}9{13}'$"),
        ({"lengths": "5x1000K"}, "--lengths: expected at most 4,194,304 cached tokens in all, got 5,120,000"),
        ({"count": 4096}, "--requests: expected at most 4,194,304 cached tokens .* 4,096 requests of 'conversation'"),
        ({"lengths": "4K", "count": 3}, "--requests: --lengths already says"),
        ({"lengths": "4K", "service": "code"}, "expected one of .*got --service and --lengths"),
        ({"service": "code", "trace": pathlib.Path("x")}, "got --service and --trace"),
        ({"count": 0}, "--requests: expected 1 to 4096, got 0"),
        ({"seed": -1}, "--seed: expected 0 to"),
        ({"seed": 2**63}, "--seed: expected 0 to"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    arguments = {"service": None, "trace": None, "lengths": None, "count": None, "seed": 0} | options
    with pytest.raises(InputError, match=message) as error:
        choose_batch(**arguments)
    assert "\n" not in str(error.value)


def test_batches(tmp_path: pathlib.Path) -> None:
    assert len(choose_batch(None, None, None, None, 0).lengths) == 32
    assert choose_batch(None, None, "2x1K+64", None, 0).lengths == [1024, 1024, 64]
    file = tmp_path / "t.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,100,1\n")
    batch = choose_batch(None, file, None, 3, 0)
    assert batch.lengths == [101] * 3 and "from 1 request of t.csv" in batch.source
    assert batch.describe() == "3 requests of 101 cached tokens, 303 in all"
    assert Batch([10], "").describe() == "1 request of 10 cached tokens, 10 in all"
    assert Batch([1, 1], "").describe() == "2 requests of 1 cached token, 2 in all"
    assert Batch([0, 1], "").describe() == "2 requests of 0 to 1 cached tokens, 1 in all"
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\nx,{(1 << 20) - 1},1\n")
    with pytest.raises(InputError, match="--requests: .*5,242,880 in 5 requests drawn from .*t.csv [(]--trace[)]"):
        choose_batch(None, file, None, 5, 0)


def test_too_many_tokens() -> None:
    with pytest.raises(InputError, match="at most 4,194,304 cached tokens, got 4,194,305"):
        make_layer(SMALL, [1 << 20] * 4 + [1], 0)


def test_layer_is_the_seeds_alone_and_poisoned() -> None:
    first, second, other = (make_layer(SMALL, [70, 3], seed) for seed in (5, 5, 6))
    assert torch.equal(first.w13.view(torch.uint8), second.w13.view(torch.uint8))
    assert torch.equal(first.q, second.q) and not torch.equal(first.q, other.q)
    used = first.cache.used()
    keys = first.cache.k_cache.float()
    assert bool(keys[used].isfinite().all()) and bool(keys[~used].isnan().all())


def test_random_e4m3_takes_every_value() -> None:
    values = random_e4m3((50_001,), torch.Generator().manual_seed(0)).float()
    assert len(values) == 50_001 and len(values.unique()) == 64
    assert float(values.abs().min()) == 0.125 and float(values.abs().max()) == 1.875
    assert float(values.mean()) == pytest.approx(0, abs=0.02)
    assert random_e4m3((2, 3), torch.Generator()).dtype == FP8


def png_size(path: pathlib.Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.parametrize(("lengths", "ctas"), [([4096] * 4, 132), ([0], 1), ([1 << 20], 1024)])
def test_picture(tmp_path: pathlib.Path, lengths: list[int], ctas: int) -> None:
    comparison = schedules.compare(decode_schedule.plan_decode(lengths, 1, ctas), lengths)
    picture.draw(tmp_path / "load.png", comparison, "subtitle")
    width, height = png_size(tmp_path / "load.png")
    assert width > 1000 and height > 600


def test_picture_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        picture.check_path(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        picture.check_path(tmp_path / "none" / "load.png")
    with pytest.raises(InputError, match="--plot: .*too long"):
        picture.check_path(tmp_path / ("x" * 300))
    if pathlib.Path("/proc/self").is_dir():  # no file can be made there, by root neither
        with pytest.raises(InputError, match="--plot: /proc/load.png"):
            picture.check_path(pathlib.Path("/proc/load.png"))
    (tmp_path / "link.png").symlink_to(tmp_path / "target.png")
    for name in ("load.png", "link.png"):
        picture.check_path(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["link.png"]
    (tmp_path / "load.png").write_bytes(b"older")
    picture.check_path(tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes() == b"older"


def test_picture_is_refused_before_the_work_or_lost_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(demo, "run", lambda *arguments: pytest.fail("the work began"))
    assert call(monkeypatch, "demo", "--plot", str(tmp_path / ("x" * 300))) == 2
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(demo, "run", functools.partial(run, shape=SMALL))
    monkeypatch.setattr(picture, "check_path", lambda path: None)  # as if the folder went away during the work
    assert call(monkeypatch, "demo", "--lengths", "100", "--plot", str(tmp_path / "none" / "load.png")) == 2
    out, err = capsys.readouterr()
    assert "All 5 results" in out and "Picture" not in out and err.count("\n") == 1


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command's exit status."""
    monkeypatch.setattr("sys.argv", ["hpc", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_command_ends_with_0_1_or_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(demo, "run", functools.partial(run, shape=SMALL))
    assert call(monkeypatch, "demo", "--lengths", "2x100", "--json", "--plot", str(tmp_path / "load.png")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["batch"]["seq_lens"] == [100, 100] and err == ""
    assert png_size(tmp_path / "load.png")
    monkeypatch.setattr(hpc_moe, "fused_moe", nan_somewhere(hpc_moe.fused_moe))
    assert call(monkeypatch, "demo", "--lengths", "2x100") == 1
    assert "Out of tolerance: fused_moe" in capsys.readouterr().out
    bad = [["--lengths=-5"], ["--trace", str(tmp_path / "none.csv")], ["--requests", "0"], ["--plot", str(tmp_path)]]
    bad += [["--requests", "many"], ["--requests", "1_0"], ["--seed", "9" * 6000], ["--requests", "9" * 6000]]
    for arguments in bad:
        assert call(monkeypatch, "demo", *arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("hpc: ") and err.count("\n") == 1
        assert len(err) < 300
    assert call(monkeypatch, "nothing") == 2


def test_the_default_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The real thing once: 32 requests, the layer of a real model."""
    assert call(monkeypatch, "demo") == 0
    out = capsys.readouterr().out
    assert "32 requests" in out and "All 5 results within tolerance" in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_bar_counts_on(capsys: pytest.CaptureFixture[str]) -> None:
    with BarProgress() as progress:
        progress.phase("work", 3)
        for _ in range(3):
            progress.advance()
    assert capsys.readouterr().err == ""  # no terminal, no bar


@pytest.mark.gpu
def test_demo_on_a_gpu_times_what_runs_there() -> None:
    result = small()
    assert result.ok and result.gpu
    planned = result.outcomes[0]
    assert planned.device.startswith("cuda") and planned.microseconds > planned.floor > 0
    for outcome in result.outcomes:
        assert outcome.microseconds is not None if outcome.device.startswith("cuda") else "CPU copies" in outcome.note


def test_every_operator_is_asked_in_its_own_words() -> None:
    """The questions that only a GPU machine asks, put for the CPU, where everything runs."""
    layer = make_layer(SMALL, [5], 0)
    for operator in ("decode", "router_gemm", "route", "fused_moe"):
        assert steps.why_not(operator, layer, torch.device("cpu")) == ""
        assert steps.why_not(operator, layer, None) == ""


def test_without_a_kernel_an_operator_runs_on_cpu_copies() -> None:
    tensor = torch.ones(2)
    result, outcome = steps._call("run", torch.device("cuda"), "comes later", lambda x: x.sum, [tensor], 8, 1.0)
    assert float(result) == 2 and (outcome.device, outcome.note) == ("cpu", "CPU copies: comes later")
    assert outcome.milliseconds is not None and outcome.microseconds is None


@pytest.mark.parametrize("cold_bytes", [0, 100e6])
def test_with_a_kernel_it_is_timed_over_buffer_sets(monkeypatch: pytest.MonkeyPatch, cold_bytes: float) -> None:
    """A device that is no CPU, as far as it goes without one: every set has its own tensors; time stands by floor."""
    made = []

    def make(x: torch.Tensor) -> Callable:
        made.append(x)
        return lambda: x

    def measure(candidates: list, device: torch.device) -> list:
        assert [call() for call in candidates[0].calls] == made and device.type == "meta"
        return [types.SimpleNamespace(us=7.5)]

    monkeypatch.setattr(steps.timing, "measure", measure)
    _, outcome = steps._call("run", torch.device("meta"), "", make, [torch.ones(2)], cold_bytes, 1.5)
    assert len(made) == (4 if cold_bytes else 1) and len({id(x) for x in made}) == len(made)
    assert (outcome.microseconds, outcome.floor, outcome.milliseconds, outcome.note) == (7.5, 1.5, None, "")
