"""Standard output that cannot be written: one line and exit status 1; silence where the reader left."""

import pathlib
import subprocess
import sys

import pytest


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["doctor"]])
def test_output_that_cannot_be_written(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "hpc_tools", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "hpc: standard output: No space left on device\n")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 1
