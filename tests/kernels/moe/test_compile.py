"""What the compiler makes of the Triton kernels of experts, for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton does not support this platform")

from tests.kernels.compile_checks import CAPABILITIES, WRITTEN_FOR, CompiledKernel, compile_launches, instructions_of

PRODUCTS = ("dense_experts_kernel", "packed_experts_kernel", "scaled_experts_kernel")
COPY_16 = r"cp\.async\.cg"
"""Sixteen bytes of an asynchronous copy, in PTX."""


def check(kernel: CompiledKernel) -> None:
    """Check that it fits, and that products copy ahead and multiply by the instructions of the generation."""
    kernel.check_fits()
    if kernel.kernel in PRODUCTS:
        assert kernel.matrix_instructions == instructions_of(kernel.capability), str(kernel)
        # Two a thread for each stage, before the loop and in it. Ada has three stages, 8 KB of MXFP4 ahead a program:
        # more than its memory delivers to a multiprocessor before the first of them arrives.
        # Rows that are no multiples of 16 bytes are not copied ahead: they wait in registers.
        assert kernel.count(COPY_16) >= 2 * kernel.num_stages or kernel.launch == "odd_3", str(kernel)
    if kernel.kernel == "scaled_experts_kernel":
        # Both operands go into the matrix instruction as they are.
        assert kernel.count(r"mma\S*\.(e4m3\.e4m3|kind::f8f6f4)") > 0, str(kernel)
    if kernel.kernel in ("packed_experts_kernel", "scaled_experts_kernel"):
        # Scales of a row and block are a word, not four bytes that each wait for the memory.
        assert kernel.count(r"ld\.global\S*\.b8") == 0, str(kernel)
        # Those of the next block are loaded while this one is multiplied. Scales of rounded inputs are not ahead. For
        # sm_100 the compiler also uses MXFP4's word of one row in the pass that loads it.
        if kernel.capability in WRITTEN_FOR:
            used, ahead = kernel.loads_in_loops()
            assert ahead > 0, str(kernel)
            assert used == 0 or kernel.kernel == "scaled_experts_kernel", str(kernel)


def test_products_of_a_step_fit_the_gpu(tmp_path: Path) -> None:
    kernels = compile_launches("tests.kernels.moe_launches:hot", (90,), tmp_path / "experts.json")
    for kernel in kernels:
        check(kernel)
    launched = [kernel.kernel for kernel in kernels if kernel.launch == "qwen_1"]
    assert launched == ["sort_kernel", "dense_experts_kernel", "dense_experts_kernel", "combine_kernel"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_products_fit_every_generation(tmp_path: Path) -> None:
    kernels = compile_launches("tests.kernels.moe_launches", CAPABILITIES, tmp_path / "experts.json")
    assert {kernel.capability for kernel in kernels} == set(CAPABILITIES)
    for kernel in kernels:
        check(kernel)
    rounded = {kernel.capability for kernel in kernels if kernel.kernel == "scaled_experts_kernel"}
    assert rounded == set(CAPABILITIES) - {80}
