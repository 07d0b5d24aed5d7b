"""How the Triton kernels of sampling compile; what they compute is compared in `test_sampling`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton does not support this platform")

from tests.kernels.compile_checks import compile_launches


@pytest.mark.compiles
def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    compiled = compile_launches("tests.kernels.sampling_launches", (80, 90), tmp_path / "compiled")
    assert {kernel.kernel for kernel in compiled} == {
        "penalties_kernel",
        "count_tokens_kernel",
        "tile_statistics_kernel",
        "threshold_kernel",
        "tile_masses_kernel",
        "draw_kernel",
    }
    for kernel in compiled:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= kernel.generation.max_shared_bytes, kernel
        if kernel.kernel in ("tile_statistics_kernel", "tile_masses_kernel"):
            assert kernel.count(r"ld\.global[^;]*\.v4") > 0, kernel
        if kernel.kernel == "threshold_kernel":
            assert kernel.count(r"cp\.async\.c[ga]\.shared\.global[^;]*, 0x10,") > 0, kernel
