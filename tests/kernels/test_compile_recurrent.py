"""What the compiler makes of the kernels with a recurrent state, for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton does not support this platform")

from tests.kernels.compile_checks import CAPABILITIES, compile_launches


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_fit_the_gpu_without_spills(tmp_path: Path) -> None:
    compiled = compile_launches("tests.kernels.recurrent_launches", CAPABILITIES, tmp_path / "recurrent.json")
    # Chunks of the delta rule are two kernels: what solves their systems is found beforehand, for all at once.
    assert len(compiled) == 15 * len(CAPABILITIES)
    for kernel in compiled:
        # Two registers that a step keeps aside while it copies a state, since it reads its inputs in wide loads.
        kernel.check_fits(8 if kernel.launch == "ssd_steps_copied" else 0)
        # Features are read 16 bytes at once, gates and what a state remembers one by one.
        assert kernel.count(r"ld\.global\S*\.b16") <= 10, str(kernel)
    launched = [kernel.kernel for kernel in compiled if (kernel.launch, kernel.capability) == ("delta_chunks", 90)]
    assert launched == ["invert_chunks_kernel", "gated_delta_kernel"]
