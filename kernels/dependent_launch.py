# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Programmatic dependent launch: the programs of a kernel are placed while the last of the kernel before it still run.

From Hopper on. A kernel that is launched with `dependent_launch` may begin before the results that it reads are there,
so the first thing it does is `wait_for_inputs`; it then lets the next kernel be placed, which waits in its turn.
Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import functools

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

FIRST_CAPABILITY = (9, 0)
_FIRST_MAJOR = triton.language.constexpr(FIRST_CAPABILITY[0])


@triton.jit
def wait_for_inputs():
    """Wait for the kernel before, and what it has written, then let the next one be placed. Nothing before Hopper."""
    if cuda_capability_geq(_FIRST_MAJOR, 0):
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return the options of a launch of a kernel that calls `wait_for_inputs`."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY:
        return {"launch_pdl": True}
    return {}
