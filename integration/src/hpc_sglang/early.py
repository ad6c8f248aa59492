"""Whether this package's Triton kernels start early and let their successors do so (programmatic dependent launch)."""

import functools
import os

import torch


@functools.cache
def early_start(device: torch.device) -> bool:
    """On a GPU from sm_90 on; HPC_PDL=0 in the environment turns it off, as for the operators' kernels."""
    if device.type != "cuda" or os.environ.get("HPC_PDL") == "0":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9
