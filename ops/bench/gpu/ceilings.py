"""What the device can do at best, measured in the same run: bytes a second, and matrix operations a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ops.bench.gpu.case import Case
from ops.bench.gpu.timer import Timer

_COPY_BYTES = 4 * 2**30
_MATRIX_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of the device.

    Attributes:
        bandwidth: Bytes a second of a large copy, read and written counted. Fractions are of this one.
        read_bandwidth: Bytes a second of a large sum, which writes nothing: what a decode comes closest to.
        matmul_rate: Operations a second of a large bf16 product of random numbers.
    """

    bandwidth: float
    read_bandwidth: float
    matmul_rate: float

    def floor_s(self, case: Case) -> float:
        """Return the seconds that a case takes at least."""
        return max(case.num_bytes / self.bandwidth, case.num_flops / self.matmul_rate)


def measure_ceilings(timer: Timer, device: torch.device) -> Ceilings:
    """Copy, read, and multiply."""
    copy_s = timer.measure(_copy(device), 1).seconds
    read_s = timer.measure(_sum(device), 1).seconds
    matmul_s = timer.measure(_multiplication(device), 1).seconds
    return Ceilings(2 * _COPY_BYTES / copy_s, _COPY_BYTES / read_s, 2 * _MATRIX_SIZE**3 / matmul_s)


def _copy(device: torch.device) -> Callable[[int], object]:
    source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda _: target.copy_(source)


def _sum(device: torch.device) -> Callable[[int], object]:
    source = torch.ones(_COPY_BYTES // 4, device=device)
    return lambda _: source.sum()


def _multiplication(device: torch.device) -> Callable[[int], object]:
    left, right = torch.randn(2, _MATRIX_SIZE, _MATRIX_SIZE, device=device).bfloat16()
    return lambda _: left @ right
