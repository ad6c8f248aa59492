"""hpc tune router: options, refusals before anything is measured, the file it writes."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from hpc_tools import tuning
from hpc_tools.errors import InputError


def test_sizes_and_tokens() -> None:
    assert tuning.sizes_of(["192x4096", " 256 x 7168"]) == [(192, 4096), (256, 7168)]
    assert tuning.tokens_of("1, 64,512") == [1, 64, 512]


@pytest.mark.parametrize("text", ["", "192", "192x", "x4096", "0x4096", "192x4097", "192x-8", "1_0x64"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(InputError, match="--size: expected"):
        tuning.sizes_of([text])


@pytest.mark.parametrize("text", ["", "0", "1,,2", "a", "-1"])
def test_bad_tokens(text: str) -> None:
    with pytest.raises(InputError, match="--tokens: expected"):
        tuning.tokens_of(text)


def test_what_was_measured_is_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_router_gemm import _C, tune

    config = _C.choose_config(m=8, n=192, k=4096, terms=2)
    fields = {name: getattr(config, name) for name in ("kernel", "rows", "tokens", "k_groups", "split", "stages")}
    row = {"n": 192, "k": 4096, "m_to": 8, **fields, "us": 3.0, "linear_us": 4.0, "cublas_us": 7.0}

    def measured(sizes, tokens, count, progress) -> dict:
        assert (sizes, tokens, count) == ([(192, 4096)], [8], 3)
        progress("a line")
        return {"device": "x", "date": "2026-11-30", "command": "", "build": {}, "rows": [row]}

    monkeypatch.setattr(tune, "tune", measured)
    path, lines = tmp_path / "tuned.json", []
    assert tuning.router(path, ["192x4096"], "8", 3, lines.append) == 1
    assert json.loads(path.read_text())["rows"] == [row] and lines == ["a line"]


def test_a_file_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match="--out: .*: "):
        tuning.router(tmp_path / "absent" / "tuned.json", [], None, 16, print)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is a GPU")
def test_without_a_gpu(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "hpc_tools", "tune", "router", "--out", str(tmp_path / "tuned.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hpc: hpc tune router: hpc_router_gemm.tune: device: expected a Hopper GPU, got ")
    assert list(tmp_path.iterdir()) == []
