"""The gated delta rule: its forms against each other and against `transformers`, whole and in steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from kernels.cpu_library import CpuLibrary, cpu_library
from kernels.gated_delta import DeltaSizes, DeltaWeights, gated_delta
from kernels.gated_delta.chunked import gated_delta_chunked
from kernels.gated_delta.cpu import gated_delta_cpu
from kernels.gated_delta.reference import gated_delta_reference
from kernels.state_rows import StateRows
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.state_batches import all_splits, state_rows
from tests.kernels.tolerances import assert_close

SIZES = [DeltaSizes(1, 1, 1, 1), DeltaSizes(2, 4, 12, 37), DeltaSizes(3, 3, 128, 128), DeltaSizes(1, 2, 130, 200)]


@pytest.fixture(scope="module")
def library() -> CpuLibrary:
    library = cpu_library()
    assert library is not None, "the tests need g++"
    return library


def inputs_of(
    sizes: DeltaSizes, num_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, DeltaWeights]:
    generator = torch.Generator().manual_seed(num_tokens + sizes.key_dim)
    qkv = torch.randn(num_tokens, sizes.num_features + 3, generator=generator).to(dtype)
    gates = torch.randn(num_tokens, 2 * sizes.num_value_heads, generator=generator).to(dtype)
    rate = torch.rand(sizes.num_value_heads, generator=generator) * 4
    return qkv[:, :-3], gates, DeltaWeights(rate, torch.randn(sizes.num_value_heads, generator=generator))


def pool_of(sizes: DeltaSizes, num_slots: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_slots)
    return torch.randn(num_slots, sizes.num_value_heads, sizes.key_dim, sizes.value_dim, generator=generator)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reference_equals_transformers(sizes: DeltaSizes) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as oracle

    qkv, gates, weights = inputs_of(sizes, 9)
    keys = sizes.num_key_heads * sizes.key_dim
    query, key = (part.reshape(1, 9, -1, sizes.key_dim) for part in qkv[:, : 2 * keys].chunk(2, dim=1))
    value = qkv[:, 2 * keys :].reshape(1, 9, -1, sizes.value_dim)
    strength, step = gates[None].chunk(2, dim=2)
    decay = -weights.rate * functional.softplus(step + weights.step_bias)
    expected, state = oracle(
        query, key, value, decay, strength.sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    states = torch.full((1, *state.shape[1:]), float("nan"))
    result = gated_delta_reference(qkv, gates, weights, sizes, states, state_rows([9], [0], [0]))
    torch.testing.assert_close(result, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_equal_single_steps(sizes: DeltaSizes, chunk: int) -> None:
    lengths, before = [1, 70, 1, 5, 2], [5, 0, 0, 1, -1]
    qkv, gates, weights = inputs_of(sizes, sum(lengths))
    saves = [[(1, 7)], [(3, 8), (64, 9), (66, 10)], [], [(4, 11)], []]
    states, rows = pool_of(sizes, 12), state_rows(lengths, before, [6, 0, 2, 3, 5], [1, 66, 0, 5, 0], saves=saves)
    theirs = states.clone()
    result = gated_delta_chunked(qkv, gates, weights, sizes, states, rows, chunk=chunk)
    expected = gated_delta_reference(qkv, gates, weights, sizes, theirs, rows)
    torch.testing.assert_close(result[:-2], expected[:-2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernel_equals_reference(library: CpuLibrary, sizes: DeltaSizes, dtype: torch.dtype) -> None:
    lengths, before = [1, 9, 1, 5, 2], [5, 0, 0, 1, -1]
    qkv, gates, weights = inputs_of(sizes, sum(lengths), dtype)
    saves = [[(1, 7)], [(3, 8), (6, 9)], [], [(4, 10)], []]
    states, rows = pool_of(sizes, 11), state_rows(lengths, before, [6, 0, 2, 3, 5], [1, 6, 0, 5, 0], saves=saves)
    theirs = states.clone()
    with poisoned_memory():
        result = gated_delta_cpu(library, qkv, gates, weights, sizes, states, rows)
    expected = gated_delta_reference(qkv, gates, weights, sizes, theirs, rows)
    assert_close(result[:-2], expected[:-2])
    torch.testing.assert_close(states, theirs, rtol=1e-5, atol=1e-5)


Form = Callable[[torch.Tensor, torch.Tensor, DeltaWeights, DeltaSizes, torch.Tensor, StateRows], torch.Tensor]


@pytest.mark.parametrize(
    ("form", "tolerance"), [(gated_delta, 0.0), (gated_delta_chunked, 1e-5)], ids=["kernel", "chunked"]
)
def test_steps_equal_the_whole_for_every_split(form: Form, tolerance: float) -> None:
    length, sizes = 8, DeltaSizes(1, 2, 20, 37)
    qkv, gates, weights = inputs_of(sizes, length)
    whole = pool_of(sizes, 1)
    expected = form(qkv, gates, weights, sizes, whole, state_rows([length], [0], [0]))
    for split in all_splits(length):
        states, parts, start = torch.full_like(whole, float("nan")), [], 0
        for count in split:
            tokens = slice(start, start + count)
            rows = state_rows([count], [start], [0])
            parts.append(form(qkv[tokens], gates[tokens], weights, sizes, states, rows))
            start += count
        torch.testing.assert_close(torch.cat(parts), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(states, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", [DeltaSizes(2, 2, 16, 33), DeltaSizes(2, 4, 12, 20)])
def test_drafts_see_each_other_and_leave_nothing(library: CpuLibrary, sizes: DeltaSizes) -> None:
    qkv, gates, weights = inputs_of(sizes, 6)
    drafted, plain = pool_of(sizes, 1), pool_of(sizes, 1)
    result = gated_delta(qkv, gates, weights, sizes, drafted, state_rows([6], [4], [0], [2]))
    expected = gated_delta(qkv[:2], gates[:2], weights, sizes, plain, state_rows([2], [4], [0]))
    assert torch.equal(drafted, plain)
    assert torch.equal(result[:2], expected)
    rest = gated_delta(qkv[2:], gates[2:], weights, sizes, plain, state_rows([4], [6], [0]))
    assert torch.equal(result[2:], rest)
