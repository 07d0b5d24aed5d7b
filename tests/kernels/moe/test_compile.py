"""What the compiler makes of the Triton kernels of experts, for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.gpu_config import GpuGeneration
from tests.kernels.compile_checks import CompiledKernel, compile_launches

PRODUCTS = ("dense_experts_kernel", "packed_experts_kernel")
# Instructions of PTX, and sixteen bytes of an asynchronous copy.
WGMMA, MMA, COPY_16 = r"wgmma\.mma_async", r"mma\.sync", r"cp\.async\.cg"


def check(kernel: CompiledKernel) -> None:
    """Check that it fits, and that products copy ahead and multiply by the instructions of the generation."""
    assert kernel.shared_bytes <= kernel.generation.max_shared_bytes, str(kernel)
    assert kernel.stack_bytes == 0, f"{kernel} spills registers"
    if kernel.kernel in PRODUCTS:
        is_hopper = kernel.generation is GpuGeneration.HOPPER
        assert (kernel.count(WGMMA) > 0) == is_hopper, str(kernel)
        assert (kernel.count(MMA) > 0) != is_hopper, str(kernel)
        assert kernel.count(COPY_16) >= 8, str(kernel)


def test_products_of_a_step_fit_the_gpu(tmp_path: Path) -> None:
    kernels = compile_launches("tests.kernels.moe_hot_launches", (90,), tmp_path / "experts.json")
    for kernel in kernels:
        check(kernel)
    launched = [kernel.kernel for kernel in kernels if kernel.launch == "qwen_1"]
    assert launched == ["sort_kernel", "dense_experts_kernel", "dense_experts_kernel", "combine_kernel"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_products_fit_both_generations(tmp_path: Path) -> None:
    kernels = compile_launches("tests.kernels.moe_launches", (80, 90), tmp_path / "experts.json")
    assert {kernel.capability for kernel in kernels} == {80, 90}
    for kernel in kernels:
        # Rows that are no multiples of 16 bytes are not copied ahead: they wait in registers.
        if kernel.launch != "odd_3":
            check(kernel)
