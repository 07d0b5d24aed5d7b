from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")

from kernels.causal_conv import triton_kernel
from kernels.causal_conv.dispatch import causal_conv_reference
from kernels.causal_conv.triton_kernel import causal_conv_triton
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.state_batches import state_rows
from tests.kernels.tolerances import assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [1, 18, 2, 1], [1, 150, 64, 1]], ids=str)
@pytest.mark.parametrize(("channels", "width", "has_silu"), [(5, 2, True), (200, 4, True), (37, 3, False)])
def test_kernel_equals_reference(
    channels: int, width: int, has_silu: bool, lengths: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(sum(lengths), channels + 3, generator=generator).to(device, dtype)[:, :channels]
    weight = torch.randn(width, channels, generator=generator).to(device, dtype)
    bias = None if has_silu else torch.randn(channels, generator=generator).to(device, dtype)
    states = torch.randn(8, width - 1, channels, generator=generator).to(device)
    theirs = states.clone()
    rows = state_rows(lengths, [5, 0, 1, -1], [4, 0, 2, 5], [1, 1, 0, 0], device, [[(1, 6)], [(1, 7)], [], []])
    with poisoned_memory():
        result = causal_conv_triton(x, weight, bias, states, rows, has_silu=has_silu)
    expected = causal_conv_reference(x, weight, bias, theirs, rows, has_silu=has_silu)
    assert_close(result[:-1], expected[:-1])
    assert torch.equal(states, theirs)


class Grids(list[tuple[int, ...]]):
    """In the place of a kernel: keeps the grids of its launches."""

    def __getitem__(self, grid: Any) -> Any:
        self.append(grid)
        return lambda *_, **__: None


@pytest.mark.parametrize(("length", "expected"), [(1, 1), (64, 1), (65, 2), (8192, 128)])
def test_tokens_of_a_prompt_are_divided_among_programs(
    length: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids = Grids()
    monkeypatch.setattr(triton_kernel, "causal_conv_kernel", grids)
    x, weight, states = torch.empty(length, 256), torch.empty(4, 256), torch.empty(1, 3, 256)
    causal_conv_triton(x, weight, None, states, state_rows([length], [0], [0]))
    # Of one sequence, in blocks of 128 channels.
    assert grids == [(1, 2, expected)]
