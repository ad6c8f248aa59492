"""Each operator's result held to its float64 reference: errors beside the tolerances that the operators promise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hpc_common import metrics
from hpc_common.reference import router as router_reference
from hpc_common.schedule import DecodeSchedule, check_schedule

# Rounding to bf16 alone gives a relative RMS near 0.0017; the rest is for fp16 and fp32 arithmetic on the way.
ATTENTION_RMS, ATTENTION_ROW_RMS, ATTENTION_LSE = 0.003, 0.006, 0.002
MOE_RMS, MOE_TOKEN_RMS = 0.006, 0.02


@dataclass(frozen=True)
class Check:
    """One comparison: an error and the largest that passes."""

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """error <= tolerance; a NaN never passes."""
        return self.error <= self.tolerance


def _worst(rows: torch.Tensor) -> float:
    return float(rows.max()) if rows.numel() else 0.0


def plan(schedule: DecodeSchedule, host: DecodeSchedule, lengths: Sequence[int]) -> list[Check]:
    """A plan's map: the host planner's byte for byte, and every invariant of the scheduler."""
    have, want = (np.frombuffer(one.raw, np.uint8) for one in (schedule, host))
    different = int((have != want).sum()) if len(have) == len(want) else max(len(have), len(want))
    broken = check_schedule(
        schedule.raw,
        lengths,
        num_kv_heads=host.num_kv_heads,
        num_ctas=host.num_ctas,
        max_seq_len=host.max_seq_len,
        max_batch=host.max_batch,
        min_tiles=host.min_tiles,
    )
    return [Check("map bytes wrong", different, 0), Check("rules broken", len(broken), 0)]


def attention(
    out: torch.Tensor, lse: torch.Tensor, reference: torch.Tensor, reference_lse: torch.Tensor
) -> list[Check]:
    """out [B, Hq, D] and lse [B, Hq] against float64 ones."""
    rows = metrics.relative_rms_rows(out.flatten(0, 1), reference.flatten(0, 1))
    return [
        Check("relative RMS", metrics.error(out, reference).relative_rms, ATTENTION_RMS),
        Check("worst row", _worst(rows), ATTENTION_ROW_RMS),
        Check("lse", metrics.error(lse, reference_lse).max_abs, ATTENTION_LSE),
    ]


def scores(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, terms: int) -> list[Check]:
    """Router scores [M, N], as shares of the error that the split into ``terms`` bf16 terms allows."""
    difference = result.cpu().to(torch.float64) - router_reference.scores(x, weight)
    rms, largest = router_reference.pool(difference, x, weight, terms)
    return [Check("RMS / bound", rms, 1), Check("largest / bound", largest, 1)]


def route(
    ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, terms: int
) -> tuple[list[Check], int]:
    """Top-k ids and weights [M, k] (softmax, renormalised), and how many tokens float64 decides.

    A token is decided where the gap between the last chosen and the best expert left out exceeds what two scores may
    be off together; its set must equal float64's. Weights are compared for the ids that were chosen.
    """
    ids = ids.cpu().long()
    exact = router_reference.scores(x, weight)
    reference = router_reference.route(exact, ids.shape[1])
    bound = router_reference.score_bound(x, weight, terms)
    decided = reference.margin > 2 * bound
    same = (ids.sort(1).values == reference.ids.sort(1).values).all(1)
    chosen = exact.softmax(1).gather(1, ids)
    wanted = chosen / chosen.sum(1, keepdim=True)
    # Probabilities of scores that are `bound` off change by a factor of at most exp(2 bound); 1e-6 is fp32's share.
    tolerance = math.expm1(2 * bound) + 1e-6
    return [
        Check("wrong sets", int((decided & ~same).sum()), 0),
        Check("weights", metrics.error(weights, wanted).max_abs, tolerance),
    ], int(decided.sum())


def moe(out: torch.Tensor, reference: torch.Tensor) -> list[Check]:
    """out [T, H] against float64 with the same quantisation points."""
    return [
        Check("relative RMS", metrics.error(out, reference).relative_rms, MOE_RMS),
        Check("worst token", _worst(metrics.relative_rms_rows(out, reference)), MOE_TOKEN_RMS),
    ]
