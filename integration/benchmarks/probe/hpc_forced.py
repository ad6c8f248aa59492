"""SGLang plugin of device_check.py: every request is made to say tokens that are known beforehand, in decode.

What an engine would have said, and with what probability, then depends on one token's decode step at a time, not on
which of two close tokens it chose earlier. ``Sampler.forward`` is replaced: the token of a position is ``token_at``;
kept are the position, its logprob and that of the likeliest token. A position names the request, where prompts' lengths
are further apart than what is generated.
"""

import json
import os
import pathlib
from typing import Any

import torch

rows: list[list[float]] = []


def token_at(positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The token said at each position."""
    return (positions.long() * 7919 + 104729) % vocabulary


def forward(sampler: Any, logits_output: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In place of Sampler.forward; its positions are the sixth argument or a keyword."""
    positions = kwargs["positions"] if "positions" in kwargs else args[4]
    logits = logits_output.next_token_logits.float()
    said = token_at(positions, logits.shape[1])
    logprobs = logits.log_softmax(1)
    forced = logprobs.gather(1, said[:, None])[:, 0]
    rows.extend(torch.stack([positions.double(), forced.double(), logprobs.max(1).values.double()], 1).tolist())
    return said.int()


def report(scheduler: Any, path: str) -> None:
    """Write the rows kept so far and what this process's operators counted, on the first rank; then forget them."""
    from hpc_sglang.compat import first_rank
    from hpc_sglang.counters import calls

    seen = {"rows": rows, "calls": dict(calls), "pid": os.getpid()}
    if first_rank():
        pathlib.Path(path).write_text(json.dumps(seen))
    rows.clear()


def register() -> None:
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.scheduler import Scheduler

    Sampler.forward = forward
    Scheduler.hpc_forced_report = report
