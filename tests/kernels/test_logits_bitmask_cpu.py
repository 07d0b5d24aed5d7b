from __future__ import annotations

import pytest
import torch

from kernels.cpu_library import cpu_library
from kernels.logits_bitmask import forbid_tokens
from kernels.logits_bitmask.dispatch import can_run, forbid_tokens_cpu, forbid_tokens_reference


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 4097])
def test_masked_logits_equal_reference(vocab_size: int) -> None:
    library = cpu_library()
    assert library is not None, "the tests need g++"
    generator = torch.Generator().manual_seed(vocab_size)
    # What lies beyond the vocabulary must stay, and so must rows that no mask names.
    logits = torch.randn(5, vocab_size + 9, generator=generator)
    logits[0, 0] = float("nan")
    rows = torch.tensor([4, 0, 2])
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).int()
    masks[1, 0] = 0
    masks[2] = -1
    expected, actual = logits.clone(), logits.clone()
    forbid_tokens_reference(expected[:, :vocab_size], rows, masks)
    assert can_run(actual[:, :vocab_size])
    forbid_tokens_cpu(library, actual[:, :vocab_size], rows, masks)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert actual[0, :vocab_size].isinf().any()
    forbid_tokens_cpu(library, actual[:, :vocab_size], rows[:0], masks[:0])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_half_precision_is_masked_too() -> None:
    logits = torch.zeros(1, 40, dtype=torch.float16)
    forbid_tokens(logits, torch.tensor([0]), torch.tensor([[0, 1]], dtype=torch.int32))
    assert (logits[0] == 0).nonzero().flatten().tolist() == [32]
