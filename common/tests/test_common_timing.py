"""The timing harness, on a clock that the test moves: what is called, in which order, and how it becomes a row."""

import json
import statistics
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hpc_common import timing
from hpc_common.timing import Candidate, Row, buffer_sets, floor_us, measure, results, write_results


class VirtualClock:
    """Time moves only where a call says so; records the order in which passes are timed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timed: list[object] = []
        self.company: list[bool] = []  # what the next questions are answered

    def alone(self) -> bool:
        return not self.company.pop(0) if self.company else True

    def call(self, name: str, seconds: float, log: list[str]):
        def run() -> None:
            log.append(name)
            self.now += seconds

        return run

    def prepare(self, calls):
        def one_pass() -> None:
            for call in calls:
                call()

        one_pass()
        return one_pass

    def seconds(self, one_pass, repeats: int) -> float:
        self.timed.append(one_pass)
        start = self.now
        for _ in range(repeats):
            one_pass()
        return self.now - start


def test_cold_rotates_over_every_set_and_hot_stays_on_the_first() -> None:
    clock, log = VirtualClock(), []
    calls = [clock.call(f"set{i}", 1e-6 * (i + 1), log) for i in range(4)]
    candidate = Candidate("op", "case", "ours", calls)
    (cold,) = measure([candidate], "cold", replays=3, rounds=2, clock=clock)
    assert log == ["set0", "set1", "set2", "set3"] * (1 + 3 * 2)
    assert cold == Row("op", "case", "ours", "cold", pytest.approx(2.5))
    log.clear()
    (hot,) = measure([candidate], "hot", replays=3, rounds=2, clock=clock)
    assert set(log) == {"set0"} and len(log) == 4 * (1 + 3 * 2)
    assert hot == Row("op", "case", "ours", "hot", pytest.approx(1.0))


def test_peers_take_turns_and_each_round_starts_with_another() -> None:
    clock, log = VirtualClock(), []
    peers = [Candidate("op", "case", name, [clock.call(name, 1e-6, log)]) for name in "abc"]
    measure(peers, replays=1, rounds=3, clock=clock)
    assert log == list("abc" + "abc" + "bca" + "cab")


def test_median_ignores_a_slow_round() -> None:
    clock = VirtualClock()
    durations = iter([5e-6] + [2e-6, 2e-6, 900e-6, 1e-6, 3e-6])

    def call() -> None:
        clock.now += next(durations)

    (row,) = measure([Candidate("op", "case", "ours", [call])], replays=1, rounds=5, clock=clock)
    assert row.us == pytest.approx(2.0)


def disturbed(company: list[bool], monkeypatch: pytest.MonkeyPatch) -> tuple[float, int, list[float]]:
    """Measures beside company as listed: microseconds, attempts, pauses. The n-th attempt's calls take n us each."""
    pauses: list[float] = []
    monkeypatch.setattr(timing.time, "sleep", pauses.append)
    clock, calls = VirtualClock(), []
    clock.company = list(company)

    def call() -> None:
        calls.append(1)
        clock.now += 1e-6 * max(1, -(-(len(calls) - 1) // 6))  # the first call prepares; then six an attempt

    (row,) = measure([Candidate("op", "case", "ours", [call])], replays=2, rounds=3, clock=clock)
    return row.us, (len(calls) - 1) // 6, pauses


@pytest.mark.parametrize(
    ("company", "attempts"),
    [([], 1), ([True], 2), ([False, True], 2), ([True, False, True, True], 4), ([True, True, False, False], 3)],
)
def test_rounds_beside_company_are_measured_again(company: list[bool], attempts: int, monkeypatch) -> None:
    # An attempt that begins in company isn't asked about its end.
    us, made, pauses = disturbed(company, monkeypatch)
    assert made == attempts and us == pytest.approx(attempts) and pauses == [timing.PAUSE_SECONDS] * (attempts - 1)


def test_company_that_stays_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning, match="something else used the device during op case"):
        us, made, pauses = disturbed([True] * 8, monkeypatch)
    assert made == timing.ATTEMPTS and us == pytest.approx(timing.ATTEMPTS) and len(pauses) == timing.ATTEMPTS - 1


def test_a_stream_that_takes_longer_than_its_best_has_company(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = timing.GraphClock("cuda")
    monkeypatch.setattr(timing, "_probes", {torch.device("cuda"): (None, timing.math.inf)})
    seconds = iter([2.0, 1.0, 1.0, 1.25, 1.4, 2.0, 2.0, 1.9, 2.1, 0.9, 1.0, 1.0, 1.2, 1.3, 1.4, 9.0, 9.0, 1.15])
    monkeypatch.setattr(clock, "seconds", lambda one_pass, repeats: next(seconds))
    assert [clock.alone() for _ in range(6)] == [True, True, False, True, False, True]


def test_replays_queue_behind_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("record")

        def synchronize(self) -> None:
            events.append("synchronize")

        def elapsed_time(self, stop: object) -> float:
            return 6.0

    cuda = SimpleNamespace(device=lambda device: nullcontext(), Event=Event, _sleep=events.append)
    clock = timing.GraphClock("cuda")
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda))
    assert clock.seconds(lambda: events.append("pass"), 3) == pytest.approx(0.006)
    delay = 3 * timing.HEAD_START_CYCLES
    assert events == ["pass", delay, "record", "pass", "pass", "pass", "record", "synchronize"]


def test_cpu_clock_times_real_work() -> None:
    short, long = torch.ones(16), torch.ones(1 << 20)
    rows = measure(
        [Candidate("sum", "short", "ours", [short.sum]), Candidate("sum", "long", "ours", [long.sum])],
        replays=5,
        rounds=5,
        device="cpu",
    )
    assert [row.case for row in rows] == ["short", "long"]
    assert 0 < rows[0].us < rows[1].us


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "warm"}, 'measure: mode: expected "cold" or "hot", got \'warm\''),
        ({"replays": 0}, "replays, rounds"),
        ({"rounds": 0}, "replays, rounds"),
        ({"candidates": [Candidate("op", "case", "ours", [])]}, "at least one call each"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    arguments = {"candidates": [Candidate("op", "case", "ours", [lambda: None])], "clock": VirtualClock()} | arguments
    with pytest.raises(ValueError, match=message):
        measure(**arguments)


def test_buffer_sets_exceed_the_cache() -> None:
    for num_bytes in (1e4, 1e6, 8.4e6, 67e6, 201e6, 1e9):
        sets = buffer_sets(num_bytes, most=10**6)
        assert (sets - 1) * num_bytes >= timing.COLD_BYTES  # between two uses of one set lie all the others
        assert sets == 2 or (sets - 2) * num_bytes < timing.COLD_BYTES
    assert buffer_sets(1e4) == 24
    assert buffer_sets(1e4, most=48) == 48


def test_floor_is_the_larger_of_reading_and_arithmetic() -> None:
    assert floor_us(0) == timing.EMPTY_KERNEL_US
    # 64 requests of 4,096 tokens, one KV head of 128, e4m3 and bf16: 67 and 134 MB, measured at 16.0 and 30.6 us.
    assert floor_us(64 * 4096 * 128 * 2) == pytest.approx(16.0, abs=0.1)
    assert floor_us(64 * 4096 * 128 * 4) == pytest.approx(30.6, abs=0.1)
    assert floor_us(8.39e6) == pytest.approx(3.04)
    values = [floor_us(megabytes * 1e5) for megabytes in range(400)]
    assert values == sorted(values)
    assert floor_us(0, 2 * 8192**3) == pytest.approx(2 * 8192**3 / 790e6)
    assert floor_us(0, 1e12, torch.float8_e4m3fn) < floor_us(0, 1e12, torch.bfloat16)
    with pytest.raises(ValueError, match="negative"):
        floor_us(-1)
    with pytest.raises(ValueError, match="dtype"):
        floor_us(1, 1, torch.float32)


def test_results_file(tmp_path) -> None:
    rows = [Row("op", "1x4K", "ours", "cold", 3.5), Row("op", "1x4K", "peer", "cold", 9.25)]
    document = results(rows, {"hpc-x": {"git": "abc"}}, "cpu", ["/somewhere/bench.py", "--only", "1x4K 2"])
    assert document["command"] == "bench.py --only '1x4K 2'"
    write_results(tmp_path / "r.json", document)
    read = json.loads((tmp_path / "r.json").read_text())
    assert read == document
    assert set(read) == {"device", "date", "command", "build", "rows"}
    assert read["device"] == "cpu"
    assert read["rows"][1] == {"op": "op", "case": "1x4K", "provider": "peer", "mode": "cold", "us": 9.25}
    write_results(tmp_path / "empty.json", results([], {}, "cpu", ["x"]))
    assert json.loads((tmp_path / "empty.json").read_text())["rows"] == []


@pytest.mark.gpu
def test_graph_clock_replays_what_was_captured() -> None:
    buffers = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
    calls = [lambda buffer=buffer: buffer.add_(1) for buffer in buffers]
    cold, _ = measure([Candidate("add", "4MB", p, calls) for p in ("ours", "peer")], replays=4, rounds=3, device="cuda")
    # Each provider: two warm-up passes, one replay in prepare, and in each of 3 rounds one untimed and 4 timed replays.
    assert all(bool((buffer == 2 * (2 + 1 + 3 * 5)).all()) for buffer in buffers)
    assert 0.5 < cold.us < 100
    clock = timing.GraphClock("cuda")
    sleep = clock.prepare([lambda: torch.cuda._sleep(1_000_000)])
    few, many = (statistics.median(clock.seconds(sleep, n) for _ in range(3)) for n in (2, 20))
    assert many > 5 * few


@pytest.mark.gpu
def test_a_prepared_pass_keeps_its_memory() -> None:
    """What only the captured calls hold is not given back while the pass is there."""
    buffer = torch.zeros(1 << 24, device="cuda")
    one_pass = timing.GraphClock("cuda").prepare([lambda buffer=buffer: buffer.add_(1)])
    del buffer
    torch.cuda.empty_cache()
    one_pass()
    torch.cuda.synchronize()
