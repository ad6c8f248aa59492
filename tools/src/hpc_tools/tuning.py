"""``hpc tune``: measures an operator's choices on this machine's GPU and writes them as a dated file."""

import json
import pathlib
import re
from collections.abc import Callable, Sequence

from .errors import InputError, whole_number
from .operators import installed


def sizes_of(texts: Sequence[str]) -> list[tuple[int, int]]:
    """(N, K) from texts such as 192x4096. Raises InputError naming ``--size``."""
    sizes = []
    for text in texts:
        parts = re.fullmatch(r"\s*(\S+?)\s*[x×]\s*(\S+)\s*", text)
        if parts is None:
            raise InputError(f"--size: expected NxK such as 192x4096, got {text!r}")
        n, k = (whole_number(part, "--size") for part in parts.groups())
        if n < 1 or k < 8 or k % 8:
            raise InputError(f"--size: expected N from 1 and K a multiple of 8, got {text!r}")
        sizes.append((n, k))
    return sizes


def tokens_of(text: str) -> list[int]:
    """Numbers of tokens from a comma-separated list. Raises InputError naming ``--tokens``."""
    tokens = [whole_number(part, "--tokens") for part in text.split(",")]
    if min(tokens) < 1:
        raise InputError(f"--tokens: expected whole numbers from 1, got {text!r}")
    return tokens


def router(
    path: pathlib.Path, sizes: Sequence[str], tokens: str | None, count: int, progress: Callable[[str], None]
) -> int:
    """Tune the router GEMM, write ``path``, return the number of rows. Raises InputError where it cannot be done."""
    entry = next(each for each in installed() if each.package.module == "hpc_router_gemm")
    if not entry.usable:
        raise InputError(f"hpc tune router: {entry.missing}")
    from hpc_common.timing import write_results
    from hpc_router_gemm import tune, tuned

    wanted_sizes = sizes_of(sizes) if sizes else list(tune.SIZES)
    wanted_tokens = tokens_of(tokens) if tokens is not None else list(tune.TOKENS)
    if count < 1:
        raise InputError(f"--configs: expected a whole number from 1, got {count}")
    try:
        path.touch()  # before minutes of measuring
    except OSError as error:
        raise InputError(f"--out: {path}: {error.strerror or error}") from None
    try:
        document = tune.tune(wanted_sizes, wanted_tokens, count=count, progress=progress)
        write_results(path, document)
    except ValueError as error:
        raise InputError(f"hpc tune router: {error}") from None
    finally:
        if path.stat().st_size == 0:
            path.unlink()
    tuned.load(path)  # what is written can be read
    return len(json.loads(path.read_text())["rows"])
