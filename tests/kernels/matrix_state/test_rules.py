"""Rules that update matrix states: their forms against each other, whole and in steps, alone and beside others."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.cpu_library import CpuLibrary
from kernels.gated_delta import DeltaSizes, DeltaWeights
from kernels.gated_delta.reference import gated_delta_reference
from kernels.ssd import SsdSizes, SsdWeights
from kernels.ssd.reference import ssd_reference
from tests.kernels.matrix_state.rules import DELTA, EACH_RULE, EACH_SIZE, SSD, Rule, Sizes, inputs_of, pool_of
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.state_batches import all_splits, state_rows
from tests.kernels.tolerances import assert_close


@EACH_SIZE
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_equal_single_steps(rule: Rule, sizes: Sizes, chunk: int) -> None:
    lengths, before = [1, 70, 1, 5, 2], [5, 0, 0, 1, -1]
    saves = [[(1, 7)], [(3, 8), (64, 9), (66, 10)], [], [(4, 11)], []]
    states, rows = pool_of(sizes, 12), state_rows(lengths, before, [6, 0, 2, 3, 5], [1, 66, 0, 5, 0], saves=saves)
    theirs, inputs = states.clone(), inputs_of(sizes, sum(lengths))
    result = inputs.run(rule.chunked, states, rows, chunk=chunk)
    expected = inputs.run(rule.reference, theirs, rows)
    torch.testing.assert_close(result[:-2], expected[:-2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@EACH_SIZE
def test_kernel_equals_reference(library: CpuLibrary, rule: Rule, sizes: Sizes, dtype: torch.dtype) -> None:
    lengths, before = [1, 9, 1, 5, 2], [5, 0, 0, 1, -1]
    saves = [[(1, 7)], [(3, 8), (6, 9)], [], [(4, 10)], []]
    states, rows = pool_of(sizes, 11), state_rows(lengths, before, [6, 0, 2, 3, 5], [1, 6, 0, 5, 0], saves=saves)
    theirs, inputs = states.clone(), inputs_of(sizes, sum(lengths), dtype)
    with poisoned_memory():
        result = inputs.run(rule.compiled, states, rows, library)
    expected = inputs.run(rule.reference, theirs, rows)
    assert_close(result[:-2], expected[:-2])
    torch.testing.assert_close(states, theirs, rtol=1e-5, atol=1e-5)


@EACH_RULE
@pytest.mark.parametrize(("form", "tolerance"), [("op", 0.0), ("chunked", 1e-5)])
def test_steps_equal_the_whole_for_every_split(rule: Rule, form: str, tolerance: float) -> None:
    length, run = 8, getattr(rule, form)
    inputs, whole = inputs_of(rule.small, length), pool_of(rule.small, 1)
    expected = inputs.run(run, whole, state_rows([length], [0], [0]))
    for split in all_splits(length):
        states, parts, start = torch.full_like(whole, float("nan")), [], 0
        for count in split:
            rows = state_rows([count], [start], [0])
            parts.append(inputs[start : start + count].run(run, states, rows))
            start += count
        torch.testing.assert_close(torch.cat(parts), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(states, whole, rtol=tolerance, atol=tolerance)


@EACH_RULE
def test_hits_equal_the_whole_for_every_prefix(rule: Rule) -> None:
    length, slots = 8, 9
    inputs, pool = inputs_of(rule.small, length), pool_of(rule.small, slots)
    saves = [[(count, count) for count in range(1, length)]]
    expected = inputs.run(rule.op, pool, state_rows([length], [0], [0], saves=saves))
    for count in range(1, length):
        states = pool[[count]]
        rest = inputs[count:].run(rule.op, states, state_rows([length - count], [count], [0]))
        assert torch.equal(rest, expected[count:])
        assert torch.equal(states, pool[:1])


@EACH_RULE
def test_sequences_do_not_depend_on_those_beside_them(rule: Rule) -> None:
    lengths, before = [1, 3, 6, 1], [4, 0, 2, 9]
    inputs, pool = inputs_of(rule.small, sum(lengths)), pool_of(rule.small, len(lengths))
    together = pool.clone()
    expected = inputs.run(rule.op, together, state_rows(lengths, before, [2, 0, 3, 1]))
    first = 0
    for slot, length, known in zip([2, 0, 3, 1], lengths, before, strict=True):
        tokens, alone = slice(first, first + length), pool.clone()
        result = inputs[tokens].run(rule.op, alone, state_rows([length], [known], [slot]))
        assert torch.equal(result, expected[tokens])
        assert torch.equal(alone[slot], together[slot])
        first += length


@EACH_RULE
def test_drafts_see_each_other_and_leave_nothing(rule: Rule) -> None:
    inputs = inputs_of(rule.drafted, 6)
    drafted, plain = pool_of(rule.drafted, 1), pool_of(rule.drafted, 1)
    result = inputs.run(rule.op, drafted, state_rows([6], [4], [0], [2]))
    expected = inputs[:2].run(rule.op, plain, state_rows([2], [4], [0]))
    assert torch.equal(drafted, plain)
    assert torch.equal(result[:2], expected)
    rest = inputs[2:].run(rule.op, plain, state_rows([4], [6], [0]))
    assert torch.equal(result[2:], rest)


@pytest.mark.parametrize("sizes", DELTA.sizes, ids=str)
def test_delta_reference_equals_transformers(sizes: DeltaSizes) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as oracle

    inputs = inputs_of(sizes, 9)
    qkv, weights = inputs.features, inputs.weights
    assert isinstance(weights, DeltaWeights)
    keys = sizes.num_key_heads * sizes.key_dim
    query, key = (part.reshape(1, 9, -1, sizes.key_dim) for part in qkv[:, : 2 * keys].chunk(2, dim=1))
    value = qkv[:, 2 * keys :].reshape(1, 9, -1, sizes.value_dim)
    strength, step = inputs.gates[None].chunk(2, dim=2)
    decay = -weights.rate * functional.softplus(step + weights.step_bias)
    expected, state = oracle(
        query, key, value, decay, strength.sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    states = torch.full((1, *sizes.state_shape), float("nan"))
    result = inputs.run(gated_delta_reference, states, state_rows([9], [0], [0]))
    torch.testing.assert_close(result, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SSD.sizes, ids=str)
def test_ssd_reference_equals_transformers(sizes: SsdSizes) -> None:
    from transformers.models.falcon_h1.modeling_falcon_h1 import mamba2_chunk_scan as oracle

    inputs = inputs_of(sizes, 9)
    features, weights = inputs.features, inputs.weights
    assert isinstance(weights, SsdWeights)
    value, *groups = features[None].split([sizes.inner_size, *[sizes.num_groups * sizes.state_size] * 2], dim=2)
    state_input, output = (part.reshape(1, 9, sizes.num_groups, -1) for part in groups)
    expected, state = oracle(
        value.reshape(1, 9, sizes.num_heads, -1),
        inputs.gates[None],
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
    states = torch.full((1, *sizes.state_shape), float("nan"))
    result = inputs.run(ssd_reference, states, state_rows([9], [0], [0]))
    torch.testing.assert_close(result, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, state.transpose(2, 3), rtol=1e-5, atol=1e-5)
