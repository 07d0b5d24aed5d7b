"""The short convolution against torch's own, whole and in steps, with drafts and padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from kernels.causal_conv import causal_conv
from kernels.causal_conv.dispatch import causal_conv_cpu, causal_conv_reference
from kernels.cpu_library import CpuLibrary
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.state_batches import all_splits, state_rows
from tests.kernels.tolerances import assert_close


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, has_silu: bool) -> torch.Tensor:
    """Convolve one whole sequence as its first tokens, by torch."""
    width, channels = weight.shape
    padded = functional.pad(x.t()[None], (width - 1, 0))
    result = functional.conv1d(padded, weight.t()[:, None], bias, groups=channels)[0].t()
    return functional.silu(result) if has_silu else result


@pytest.mark.parametrize("has_silu", [True, False])
@pytest.mark.parametrize(("channels", "width"), [(1, 2), (37, 4), (530, 3)])
def test_whole_sequences_equal_torch(channels: int, width: int, has_silu: bool) -> None:
    x, weight, bias = torch.randn(9, channels), torch.randn(width, channels), torch.randn(channels)
    states = torch.full((4, width - 1, channels), float("nan"))
    rows = state_rows([7, 2], [0, 0], [3, 1])
    result = causal_conv(x, weight, bias, states, rows, has_silu=has_silu)
    expected = torch.cat([convolved(part, weight, bias, has_silu) for part in (x[:7], x[7:])])
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    padded = functional.pad(x[:7], (0, 0, width - 1, 0))
    assert torch.equal(states[3], padded[-(width - 1) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("channels", "width"), [(1, 2), (37, 4), (1100, 4), (64, 3)])
def test_kernel_equals_reference(library: CpuLibrary, channels: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(channels)
    lengths, before = [1, 6, 1, 3, 2, 1], [5, 0, 0, 1, 9, -1]
    wide = torch.full((sum(lengths), channels + 3), float("nan"), dtype=dtype)
    wide[:, :channels] = torch.randn(sum(lengths), channels, generator=generator).to(dtype)
    weight = torch.randn(width, channels, generator=generator).to(dtype)
    states = torch.randn(11, width - 1, channels, generator=generator)
    theirs, rows = (
        states.clone(),
        state_rows(
            lengths, before, [6, 0, 2, 3, 7, 5], [1, 4, 1, 1, 2, 0], saves=[[], [(1, 8), (3, 9)], [(1, 10)], [], [], []]
        ),
    )
    with poisoned_memory():
        result = causal_conv_cpu(library, wide[:, :channels], weight, None, states, rows)
    expected = causal_conv_reference(wide[:, :channels], weight, None, theirs, rows)
    assert_close(result[:-1], expected[:-1])
    assert torch.equal(states, theirs)


@pytest.mark.parametrize("convolve", [causal_conv, causal_conv_reference], ids=["kernel", "reference"])
def test_steps_equal_the_whole_for_every_split(convolve: Callable[..., torch.Tensor]) -> None:
    length, channels, width = 7, 21, 4
    x, weight = torch.randn(length, channels), torch.randn(width, channels)
    whole = torch.zeros(1, width - 1, channels)
    expected = causal_conv(x, weight, None, whole, state_rows([length], [0], [0]))
    for split in all_splits(length):
        states, parts, start = torch.full_like(whole, float("nan")), [], 0
        for count in split:
            rows = state_rows([count], [start], [0])
            parts.append(convolve(x[start : start + count], weight, None, states, rows))
            start += count
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(states, whole)
