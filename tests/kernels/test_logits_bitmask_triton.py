from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.logits_bitmask.dispatch import forbid_tokens_reference
from kernels.logits_bitmask.triton_kernel import forbid_tokens_triton
from tests.kernels.compile_checks import compile_launches


@pytest.mark.parametrize("vocab_size", [31, 32, 4097, 9999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_masked_logits_equal_reference(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # What lies beyond the vocabulary must stay, and so must rows that no mask names.
    logits = torch.randn(5, vocab_size + 9, generator=generator).to(dtype)
    rows = torch.tensor([4, 0, 2])
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).int()
    masks[1, 0] = 0
    masks[2] = -1
    expected, actual = logits.clone(), logits.to(device, copy=True)
    forbid_tokens_reference(expected[:, :vocab_size], rows, masks)
    forbid_tokens_triton(actual[:, :vocab_size], rows.to(device), masks.to(device))
    assert torch.equal(actual.cpu(), expected)
    forbidden = expected.isinf().sum(dim=1)
    assert forbidden[[1, 2, 3]].tolist() == [0, 0, 0]
    assert forbidden[0] >= 31
    assert forbidden[4] > 0


def test_no_masks_launch_nothing(device: torch.device) -> None:
    logits = torch.ones(2, 40, device=device)
    empty = torch.empty(0, 2, dtype=torch.int32, device=device)
    forbid_tokens_triton(logits, torch.empty(0, dtype=torch.int64, device=device), empty)
    assert bool((logits == 1).all())


def test_kernel_compiles_and_reads_no_logits(tmp_path: Path) -> None:
    for kernel in compile_launches("tests.kernels.elementwise_launches:bitmask", (80, 90), tmp_path / "compiled"):
        assert kernel.stack_bytes == 0, kernel
        # The row's number and the words of the mask: four of them a thread at most.
        assert kernel.count(r"ld\.global") <= 5, kernel
