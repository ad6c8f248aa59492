"""How far a result is from a float64 reference."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Error:
    """Errors of one result.

    max_abs: largest absolute difference. rms: root mean square of the difference. relative_rms: rms of the difference
    over rms of the reference (0 where both are 0, inf where only the reference is 0). A NaN in the result that the
    reference has not is reported as inf in every field, so no comparison passes it.
    """

    max_abs: float
    rms: float
    relative_rms: float


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def error(result: torch.Tensor, reference: torch.Tensor) -> Error:
    """Compare ``result`` with ``reference`` (same shape), in float64 on the CPU.

    Equal infinities count as no difference; any other non-finite mismatch makes every field inf.
    """
    if result.shape != reference.shape:
        raise ValueError(f"hpc_common.error: result: expected shape {list(reference.shape)}, got {list(result.shape)}")
    have = result.detach().to("cpu", torch.float64)
    want = reference.detach().to("cpu", torch.float64)
    same = (have == want) | (have.isnan() & want.isnan())
    difference = torch.where(same, torch.zeros_like(want), have - want)
    if not bool(difference.isfinite().all()):
        return Error(float("inf"), float("inf"), float("inf"))
    finite = torch.where(want.isfinite(), want, torch.zeros_like(want))
    rms, scale = _rms(difference), _rms(finite)
    relative = 0.0 if rms == 0 else (rms / scale if scale else float("inf"))
    return Error(float(difference.abs().max()) if difference.numel() else 0.0, rms, relative)


def relative_rms_rows(result: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative RMS error of each row (all dimensions but the first), float64 [rows]; 0 where both rows are 0."""
    have = result.detach().to("cpu", torch.float64).flatten(1)
    want = reference.detach().to("cpu", torch.float64).flatten(1)
    rms = (have - want).square().mean(1).sqrt()
    scale = want.square().mean(1).sqrt()
    relative = torch.where(rms == 0, torch.zeros_like(rms), rms / scale)
    return torch.where(rms.isnan(), torch.full_like(rms, float("inf")), relative)
