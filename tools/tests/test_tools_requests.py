"""Request lengths: the quantiles and their draw, traces good and bad."""

import pathlib
import statistics

import pytest
from hpc_tools import requests
from hpc_tools.errors import InputError
from hpc_tools.requests import LEVELS, MAX_LENGTH, SERVICES, draw, draw_from_trace, quantile, read_trace
from hypothesis import given
from hypothesis import strategies as st


def mean(values: tuple[int, ...], power: int = 1) -> float:
    """E[v^power] of the distribution whose quantile function is linear between the given points, exactly."""
    total = 0.0
    for p0, p1, a, b in zip(LEVELS, LEVELS[1:], values, values[1:], strict=False):
        moment = (a + b) / 2 if power == 1 else (a * a + a * b + b * b) / 3
        total += (p1 - p0) * moment
    return total


def test_quantiles_are_points_of_the_function() -> None:
    for service in SERVICES.values():
        for values in (service.context, service.generated):
            assert len(values) == len(LEVELS) and list(values) == sorted(values)
            assert [quantile(values, level) for level in LEVELS] == pytest.approx(values)
    assert quantile(SERVICES["code"].context, 0.375) == pytest.approx((578 + 1469) / 2)
    assert quantile(SERVICES["conversation"].generated, 0.9995) == pytest.approx((954 + 1000) / 2)


@pytest.mark.parametrize("service", SERVICES)
def test_draw_follows_the_rule(service: str) -> None:
    """Mean length against E[c] + E[g (g + 1) / 2] / E[g]: g is kept in proportion to itself, the stage is uniform."""
    figures = SERVICES[service]
    expected = mean(figures.context) + (mean(figures.generated, 2) + mean(figures.generated)) / 2 / mean(
        figures.generated
    )
    drawn = [length for seed in range(6) for length in draw(service, 4096, seed)]
    assert statistics.fmean(drawn) == pytest.approx(expected, rel=0.02)
    assert min(drawn) >= figures.context[0] + 1
    assert max(drawn) <= figures.context[-1] + figures.generated[-1]


def test_draw_is_the_seeds_alone() -> None:
    assert draw("code", 32, 0) == draw("code", 32, 0)
    assert draw("code", 32, 0)[:8] == draw("code", 8, 0)
    assert draw("code", 32, 0) != draw("code", 32, 1) != draw("conversation", 32, 1)


@pytest.mark.parametrize("count", [0, -1, 4097])
def test_bad_count(count: int) -> None:
    with pytest.raises(InputError, match=f"--requests: expected 1 to 4096, got {count}"):
        draw("code", count, 0)


def test_unknown_service() -> None:
    with pytest.raises(InputError, match="--service: expected code or conversation, got mail"):
        draw("mail", 1, 0)


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    file = path / "trace.csv"
    file.write_text(text)
    return file


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@given(st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 10**4)), min_size=1, max_size=20))
def test_trace_is_read_as_written(tmp_path: pathlib.Path, pairs: list[tuple[int, int]]) -> None:
    file = write(tmp_path, HEAD + "".join(f"2023-11-16 18:17:03.97,{c},{g}\n" for c, g in pairs))
    if any(g for _, g in pairs):
        assert read_trace(file) == pairs
    else:
        with pytest.raises(InputError, match="at least one request with generated tokens"):
            read_trace(file)


def test_trace_may_have_other_columns_another_order_and_a_mark(tmp_path: pathlib.Path) -> None:
    file = write(tmp_path, "\ufeffGeneratedTokens,Model,ContextTokens,TIMESTAMP\n 5 ,a,10,x\n")
    assert read_trace(file) == [(10, 5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing: TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens\nx,1\n", "missing: GeneratedTokens"),
        (HEAD, "at least one request"),
        (HEAD + "x,1,2\nx,-5,2\n", "line 3: ContextTokens: expected no negative number, got -5"),
        (HEAD + "x,1,-2\n", "line 2: GeneratedTokens: expected no negative number, got -2"),
        (HEAD + "x,1,two\n", "line 2: GeneratedTokens: expected a whole number, got 'two'"),
        (HEAD + "x,1.5,2\n", "ContextTokens: expected a whole number"),
        (HEAD + "x,1\n", "line 2: GeneratedTokens: expected a whole number, got ''"),
        (HEAD + f"x,{MAX_LENGTH},1\n", f"line 2: expected at most {MAX_LENGTH} tokens"),
        (HEAD + "x,1," + "9" * 6000 + "\n", "line 2: GeneratedTokens: expected at most 20 digits, got 6000"),
        (HEAD + "x,1," + "y" * 6000 + "\n", "line 2: GeneratedTokens: expected a whole number, got 'yyy"),
        (HEAD + "x,1_0,2\n", "line 2: ContextTokens: expected a whole number, got '1_0'"),
        (HEAD + "x,1,2\nx\0,1,2\n", "line 3: expected text in UTF-8, got a NUL character"),
        (HEAD + "x" * 200_000 + ",1,2\n", ": field larger than field limit"),
        ("TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\nx,1,2,3\n", "more than once: ContextTokens"),
    ],
)
def test_bad_trace_names_file_and_line(tmp_path: pathlib.Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(InputError) as error:
        read_trace(file)
    assert message in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(file)) + 150


def test_trace_that_is_no_text(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(InputError, match="CSV file in UTF-8"):
        read_trace(file)
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(InputError, match="directory"):
        read_trace(tmp_path)


def test_draw_from_trace_weighs_by_generated_tokens() -> None:
    """(c, g) of one row stay together; a request of 300 tokens is met three times as often as one of 100."""
    pairs = [(10_000, 100), (50_000, 300), (90_000, 0)]
    drawn = [length for seed in range(4) for length in draw_from_trace(pairs, 4096, seed)]
    short = [length - 10_000 for length in drawn if length < 20_000]
    long = [length - 50_000 for length in drawn if length > 20_000]
    assert len(long) / len(short) == pytest.approx(3, rel=0.08)
    assert (min(short), max(short)) == (1, 100) and (min(long), max(long)) == (1, 300)
    assert statistics.fmean(short) == pytest.approx(50.5, rel=0.05)
    with pytest.raises(InputError, match="--requests"):
        draw_from_trace(pairs, 0, 0)


def test_the_source_is_named() -> None:
    for word in ("Azure Public Dataset", "2023", "CC-BY", "Patel", "ISCA 2024"):
        assert word in requests.SOURCE
