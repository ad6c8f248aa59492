"""The tables' notation for request lengths."""

import pytest
from hpc_common.lengths import format_lengths, parse_lengths
from hpc_common.strategies import lengths
from hypothesis import given


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("2x32K+3x4K", [32768] * 2 + [4096] * 3),
        ("32x0.125K", [128] * 32),
        ("7 + 2 x 1.5k", [7, 1536, 1536]),
        ("0x4K+1", [1]),
    ],
)
def test_parse_lengths(text, want):
    assert parse_lengths(text) == want


@pytest.mark.parametrize(
    "text", ["", "x4K", "4x", "-1", "1x-4K", "1x4M", "2x0.3K", "1x4K+", "1x2000K", "9999999x1", "9" * 6000, "\u0663"]
)
def test_parse_lengths_refuses(text):
    with pytest.raises(ValueError, match="hpc_common.parse_lengths: lengths: expected"):
        parse_lengths(text)


def test_parse_lengths_says_which_limit_and_shortens():
    with pytest.raises(ValueError, match="expected at most 1048576 tokens a request, got '1x2000K'"):
        parse_lengths("1x2000K")
    with pytest.raises(ValueError, match="expected 1 to 8 requests, got 9$"):
        parse_lengths("4x1+5x2", requests=(1, 8))
    with pytest.raises(ValueError, match="expected 1 to 8 requests, got 0$"):
        parse_lengths("0x1", requests=(1, 8))
    assert parse_lengths("3x1+5x2", requests=(1, 8)) == [1] * 3 + [2] * 5
    for text in ("9" * 6000, "x" * 6000, "1x4K+" * 1000):
        with pytest.raises(ValueError) as error:
            parse_lengths(text, most=1 << 20)
        assert len(str(error.value)) < 150


@given(lengths(max_batch=40))
def test_format_lengths_is_read_back(batch):
    assert not batch or parse_lengths(format_lengths(batch)) == batch
