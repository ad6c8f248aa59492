"""Tables measured on one's own GPU: what tuning writes, what is read, and what is chosen by it."""

import json
import pathlib
from collections.abc import Iterator

import pytest
import torch
from hpc_common.capability import Capability
from hpc_common.timing import Candidate, Row, write_results
from hpc_router_gemm import _C, tune, tuned

NAME = "Some GPU"
SIZE = (192, 4096)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables are read once a process; each test reads its own."""
    caches = (tuned._of_environment, tuned.of_device, tuned._config, tuned._device_name)
    monkeypatch.delenv(tuned.ENVIRONMENT, raising=False)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


class Timer:
    """In place of measuring: the Config that comes third is the fastest, for three terms the fourth, for three of
    linear the second; cuBLAS wins for one token alone."""

    def __init__(self) -> None:
        self.tried: dict[str, int] = {}

    def __call__(self, candidates: list[Candidate], **_: object) -> list[Row]:
        case = candidates[0].case
        if candidates[0].op == "router-2":
            self.tried[case] = len(candidates)
            times = [abs(i - 2) + 3.0 for i in range(len(candidates))]
        elif candidates[0].op == "router-3":
            times = [abs(i - 3) + 4.0 for i in range(len(candidates))]
        elif candidates[0].provider != "cuBLAS fp32":
            assert candidates[0].op == "linear-3" and len(candidates) == self.tried[case]
            times = [abs(i - 1) + 5.0 for i in range(len(candidates))]
        else:
            (times,) = [[4.0 if case.endswith("m=1") else 6.0] for _ in candidates]
        return [Row(c.op, c.case, c.provider, "cold", us) for c, us in zip(candidates, times, strict=True)]


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> dict:
    gpu = Capability("cpu", NAME, (9, 0), 132, True, "")
    monkeypatch.setattr(tune, "capability", lambda device, where: gpu)
    timer, lines = Timer(), []
    result = tune.tune([SIZE], [64, 1], count=5, progress=lines.append, timer=timer)
    assert timer.tried == {"192x4096 m=1": 5, "192x4096 m=64": 5}
    assert len(lines) == 2 and lines[0].startswith("192x4096 m=1: ") and "cuBLAS fp32 4.00" in lines[0]
    return result


def written(document: dict, folder: pathlib.Path) -> pathlib.Path:
    path = folder / "tuned.json"
    write_results(path, document)
    return path


def test_the_fastest_config_is_written_and_read(document: dict, tmp_path: pathlib.Path) -> None:
    assert document["device"] == NAME and document["date"]
    table = tuned.load(written(document, tmp_path))
    assert (table.device, table.date) == (NAME, document["date"])
    assert [row.m_to for row in table.choices[SIZE]] == [1, 64]
    for row in table.choices[SIZE]:
        third = tune.candidate_configs(row.m_to, *SIZE, 2, 5, presplit=True)[2]
        assert repr(_C.make_config(m=row.m_to, n=192, k=4096, terms=2, **row.config)) == repr(third)
        second = tune.candidate_configs(row.m_to, *SIZE, 3, 5)[1]
        assert repr(_C.make_config(m=row.m_to, n=192, k=4096, terms=3, **row.config_three)) == repr(second)
        fourth = tune.candidate_configs(row.m_to, *SIZE, 3, 5, presplit=True)[3]
        assert repr(_C.make_config(m=row.m_to, n=192, k=4096, terms=3, **row.config_owned_three)) == repr(fourth)
        assert (row.us, row.linear_us) == (3.0, 5.0)


def test_a_row_serves_the_tokens_up_to_it(
    document: dict, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuned.ENVIRONMENT, str(written(document, tmp_path)))
    monkeypatch.setattr(tuned, "_device_name", lambda index: NAME)
    device = torch.device("cuda", 0)
    rows = tuned.of_device(NAME).choices[SIZE]
    for m, row in ((1, rows[0]), (2, rows[1]), (64, rows[1])):
        owned = {2: row.config, 3: row.config_owned_three}
        for terms, presplit in ((2, True), (3, False), (3, True)):
            config = tuned.config_of(device, m, *SIZE, terms, presplit)
            fields = owned[terms] if presplit else row.config_three
            assert {name: getattr(config, name) for name in fields} == fields
    assert (tuned.config_of(device, 64, *SIZE, 2) is None) == rows[1].config["presplit"]  # what it reads is not there
    assert tuned.config_of(device, 65, *SIZE, 2) is None  # above what was measured
    assert tuned.config_of(device, 1, 200, 4096, 2) is None
    assert [tuned.linear_uses_cublas(device, m, *SIZE) for m in (1, 2, 64, 65)] == [True, False, False, False]
    monkeypatch.setattr(tuned, "_device_name", lambda index: "Another GPU")
    assert tuned.config_of(device, 1, *SIZE, 2) is None and not tuned.linear_uses_cublas(device, 1, *SIZE)


def test_an_older_table_has_one_config_and_sums_over_the_stages(document: dict, tmp_path: pathlib.Path) -> None:
    for row in document["rows"]:
        for name in ("three", "owned_three", "sums_apart", "presplit", "paired", "pairs_experts"):
            del row[name]
    for row in tuned.load(written(document, tmp_path)).choices[SIZE]:
        assert row.config_three is row.config_owned_three is None and row.config["presplit"] is False
        assert row.config["sums_apart"] is False


def test_without_a_table_nothing_is_tuned() -> None:
    assert tuned.config_of(torch.device("cuda", 0), 1, *SIZE, 2) is None


def test_crossovers_that_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    for date, sizes in tuned.CROSSOVERS.values():
        assert date >= "2026-11-30" and sizes
    # No band is measured so far; one would be obeyed at both its ends.
    monkeypatch.setitem(tuned.CROSSOVERS, NAME, ("2026-11-30", {SIZE: ((2, 4), (9, 9))}))
    assert [m for m in range(12) if tuned.cublas_is_faster(NAME, m, *SIZE)] == [2, 3, 4, 9]
    assert not tuned.cublas_is_faster(NAME, 3, 384, 3072) and not tuned.cublas_is_faster("Another GPU", 3, *SIZE)


def test_the_shipped_crossovers_are_what_was_measured() -> None:
    """Every size of CROSSOVERS is in the results, and cuBLAS fp32 was faster in no row of its empty bands."""
    results = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"
    times: dict[str, dict[tuple[str, str], float]] = {}
    for name in ("h200.json", "h200_decode.json"):
        for row in json.loads((results / name).read_text())["rows"]:
            if row["mode"] == "cold":
                times.setdefault(row["case"], {})[row["op"], row["provider"]] = row["us"]
    sizes = tuned.CROSSOVERS["NVIDIA H200"][1]
    assert {tuple(map(int, case.split()[0].split("x"))) for case in times} == set(sizes)
    for case, row in times.items():
        size = tuple(map(int, case.split()[0].split("x")))
        m = int(case.split("=")[1])
        ours = next(row[op, "ours"] for op in ("linear-3", "router-3", "router-2") if (op, "ours") in row)
        banded = any(first <= m <= last for first, last in sizes[size])
        assert banded == (row["router-2", "cuBLAS fp32"] < ours), case


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"device": "x", "date": "y"}',
        '{"device": "x", "date": "y", "rows": [{"n": 192}]}',
        '{"device": "x", "date": "y", "rows": [{"n": 192, "k": 4096, "m_to": 1, "kernel": "tile", "rows": 65, '
        '"tokens": 8, "k_groups": 1, "split": 1, "stages": 4, "us": 1, "linear_us": 1, "cublas_us": 1}]}',
    ],
)
def test_what_is_no_table_is_refused(text: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"HPC_ROUTER_TUNED: .*bad.json: expected a table that hpc tune router wrote"):
        tuned.load(path)
    with pytest.raises(ValueError, match="HPC_ROUTER_TUNED"):
        tuned.load(tmp_path / "absent.json")


def test_bad_tuning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="hpc_router_gemm.tune: device: expected a Hopper GPU, got cpu"):
        tune.tune(device="cpu")
    gpu = Capability("cpu", NAME, (9, 0), 132, True, "")
    monkeypatch.setattr(tune, "capability", lambda device, where: gpu)
    with pytest.raises(ValueError, match="sizes, tokens, count"):
        tune.tune([], [1])
    with pytest.raises(ValueError, match="hpc_router_gemm.config: k"):
        tune.tune([(192, 4097)], [1], timer=Timer())


@pytest.mark.parametrize("presplit", [False, True])
def test_candidates_begin_with_the_chosen_and_differ(presplit: bool) -> None:
    for m in (1, 64, 1024):
        names = [repr(config) for config in tune.candidate_configs(m, *SIZE, 2, 12, presplit)]
        assert names[0] == repr(_C.choose_config(m=m, n=192, k=4096, terms=2, presplit=presplit))
        assert len(names) == len(set(names)) == 12


@pytest.mark.gpu
def test_a_tuned_table_on_a_gpu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tunes one small size for real; its Config is used and right; a band of cuBLAS's gives its fp32 scores."""
    from hpc_common.reference import router as reference
    from hpc_router_gemm import RouterWeight, linear, router_gemm

    document = tune.tune([(64, 2048)], [1, 128], count=4)
    name = torch.cuda.get_device_name()
    assert document["device"] == name and len(document["rows"]) == 2
    document["rows"][0].update(linear_us=2.0, cublas_us=1.0)
    document["rows"][1].update(linear_us=1.0, cublas_us=2.0)
    monkeypatch.setenv(tuned.ENVIRONMENT, str(written(document, tmp_path)))
    tuned._of_environment.cache_clear()
    weight = torch.randn((64, 2048), device="cuda")
    for m in (1, 100):
        x = torch.randn((m, 2048), device="cuda").to(torch.bfloat16)
        assert tuned.config_of(x.device, m, 64, 2048, 2) is not None
        rms, largest = reference.pool(
            router_gemm(x, RouterWeight(weight)).cpu().double() - reference.scores(x, weight), x, weight, 2
        )
        assert rms <= 1 and largest <= 1
        before = torch.backends.cuda.matmul.allow_tf32
        scores = linear(x, weight)
        assert torch.backends.cuda.matmul.allow_tf32 == before
        torch.testing.assert_close(scores.cpu().double(), reference.scores(x, weight), rtol=0, atol=2e-3)
        if m == 1:
            assert torch.equal(scores, x.float() @ weight.T)
