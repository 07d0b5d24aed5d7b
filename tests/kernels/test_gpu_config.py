from __future__ import annotations

import pytest

from kernels.gpu_config import GpuGeneration, generation_of


@pytest.mark.parametrize(
    ("capability", "generation", "max_shared_kb"),
    [
        ((7, 5), GpuGeneration.ADA, 99),
        ((8, 0), GpuGeneration.AMPERE, 163),
        ((8, 6), GpuGeneration.ADA, 99),
        ((8, 9), GpuGeneration.ADA, 99),
        ((9, 0), GpuGeneration.HOPPER, 227),
        ((10, 0), GpuGeneration.HOPPER, 227),
        ((12, 0), GpuGeneration.ADA, 99),
    ],
)
def test_capability_belongs_to_generation(
    capability: tuple[int, int], generation: GpuGeneration, max_shared_kb: int
) -> None:
    assert generation_of(*capability) is generation
    assert generation.max_shared_bytes == max_shared_kb * 1024
