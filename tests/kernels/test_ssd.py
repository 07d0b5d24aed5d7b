"""Mamba-2's state update: its forms against each other and against `transformers`, whole and in steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.cpu_library import CpuLibrary, cpu_library
from kernels.ssd import SsdSizes, SsdWeights, ssd
from kernels.ssd.chunked import ssd_chunked
from kernels.ssd.cpu import ssd_cpu
from kernels.ssd.reference import ssd_reference
from kernels.state_rows import StateRows
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.state_batches import all_splits, state_rows
from tests.kernels.tolerances import assert_close

SIZES = [SsdSizes(1, 1, 1, 1), SsdSizes(4, 37, 2, 12), SsdSizes(3, 64, 1, 128), SsdSizes(2, 200, 2, 130)]


@pytest.fixture(scope="module")
def library() -> CpuLibrary:
    library = cpu_library()
    assert library is not None, "the tests need g++"
    return library


def inputs_of(
    sizes: SsdSizes, num_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, SsdWeights]:
    generator = torch.Generator().manual_seed(num_tokens + sizes.state_size)
    features = torch.randn(num_tokens, sizes.num_features + 3, generator=generator).to(dtype)
    # So that results have the size of values.
    features[:, sizes.inner_size :] *= sizes.state_size**-0.25
    steps = torch.randn(num_tokens, sizes.num_heads + 1, generator=generator).to(dtype)
    rate = torch.rand(sizes.num_heads, generator=generator) * 4
    step_bias, skip = torch.randn(2, sizes.num_heads, generator=generator)
    return features[:, :-3], steps[:, 1:], SsdWeights(rate, step_bias, skip, 0.1, 2.0)


def pool_of(sizes: SsdSizes, num_slots: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_slots)
    return torch.randn(num_slots, sizes.num_heads, sizes.state_size, sizes.head_dim, generator=generator)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reference_equals_transformers(sizes: SsdSizes) -> None:
    from transformers.models.falcon_h1.modeling_falcon_h1 import mamba2_chunk_scan as oracle

    features, steps, weights = inputs_of(sizes, 9)
    value, *groups = features[None].split([sizes.inner_size, *[sizes.num_groups * sizes.state_size] * 2], dim=2)
    state_input, output = (part.reshape(1, 9, sizes.num_groups, -1) for part in groups)
    expected, state = oracle(
        value.reshape(1, 9, sizes.num_heads, -1),
        steps[None],
        -weights.rate,
        state_input,
        output,
        4,
        D=weights.skip,
        dt_bias=weights.step_bias,
        dt_softplus=True,
        dt_limit=(weights.min_step, weights.max_step),
        return_final_states=True,
    )
    states = torch.full((1, sizes.num_heads, sizes.state_size, sizes.head_dim), float("nan"))
    result = ssd_reference(features, steps, weights, sizes, states, state_rows([9], [0], [0]))
    torch.testing.assert_close(result, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, state.transpose(2, 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_equal_single_steps(sizes: SsdSizes, chunk: int) -> None:
    lengths, before = [1, 70, 1, 5, 2], [5, 0, 0, 1, -1]
    features, steps, weights = inputs_of(sizes, sum(lengths))
    saves = [[(1, 7)], [(3, 8), (64, 9), (66, 10)], [], [(4, 11)], []]
    states, rows = pool_of(sizes, 12), state_rows(lengths, before, [6, 0, 2, 3, 5], [1, 66, 0, 5, 0], saves=saves)
    theirs = states.clone()
    result = ssd_chunked(features, steps, weights, sizes, states, rows, chunk=chunk)
    expected = ssd_reference(features, steps, weights, sizes, theirs, rows)
    torch.testing.assert_close(result[:-2], expected[:-2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernel_equals_reference(library: CpuLibrary, sizes: SsdSizes, dtype: torch.dtype) -> None:
    lengths, before = [1, 9, 1, 5, 2], [5, 0, 0, 1, -1]
    features, steps, weights = inputs_of(sizes, sum(lengths), dtype)
    saves = [[(1, 7)], [(3, 8), (6, 9)], [], [(4, 10)], []]
    states, rows = pool_of(sizes, 11), state_rows(lengths, before, [6, 0, 2, 3, 5], [1, 6, 0, 5, 0], saves=saves)
    theirs = states.clone()
    with poisoned_memory():
        result = ssd_cpu(library, features, steps, weights, sizes, states, rows)
    expected = ssd_reference(features, steps, weights, sizes, theirs, rows)
    assert_close(result[:-2], expected[:-2])
    torch.testing.assert_close(states, theirs, rtol=1e-5, atol=1e-5)


Form = Callable[[torch.Tensor, torch.Tensor, SsdWeights, SsdSizes, torch.Tensor, StateRows], torch.Tensor]


@pytest.mark.parametrize(("form", "tolerance"), [(ssd, 0.0), (ssd_chunked, 1e-5)], ids=["kernel", "chunked"])
def test_steps_equal_the_whole_for_every_split(form: Form, tolerance: float) -> None:
    length, sizes = 8, SsdSizes(2, 37, 1, 20)
    features, steps, weights = inputs_of(sizes, length)
    whole = pool_of(sizes, 1)
    expected = form(features, steps, weights, sizes, whole, state_rows([length], [0], [0]))
    for split in all_splits(length):
        states, parts, start = torch.full_like(whole, float("nan")), [], 0
        for count in split:
            tokens = slice(start, start + count)
            rows = state_rows([count], [start], [0])
            parts.append(form(features[tokens], steps[tokens], weights, sizes, states, rows))
            start += count
        torch.testing.assert_close(torch.cat(parts), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(states, whole, rtol=tolerance, atol=tolerance)


def test_drafts_see_each_other_and_leave_nothing(library: CpuLibrary) -> None:
    sizes = SsdSizes(2, 33, 2, 16)
    features, steps, weights = inputs_of(sizes, 6)
    drafted, plain = pool_of(sizes, 1), pool_of(sizes, 1)
    result = ssd(features, steps, weights, sizes, drafted, state_rows([6], [4], [0], [2]))
    expected = ssd(features[:2], steps[:2], weights, sizes, plain, state_rows([2], [4], [0]))
    assert torch.equal(drafted, plain)
    assert torch.equal(result[:2], expected)
    rest = ssd(features[2:], steps[2:], weights, sizes, plain, state_rows([4], [6], [0]))
    assert torch.equal(result[2:], rest)
