"""Logits against `transformers`, for every family and option, beyond the trained length of every rotary scaling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpu_worker.layers import rotations
from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.pairs import CPU, Pair
from tests.gpu_worker.models.variants import TRAINED_LEN, VARIANTS, oracle_logits, random_tokens

LENGTHS = (75, 41)
TOLERANCE = 1e-4


def expected_logits(pair: Pair, name: str) -> list[torch.Tensor]:
    # Dynamic scaling depends on the length: the oracle must grow into it, as in generation.
    prompt = TRAINED_LEN - 4 if name.endswith("dynamic") else None
    return [oracle_logits(pair.oracle, random_tokens(length), prompt) for length in LENGTHS]


@pytest.mark.parametrize("name", VARIANTS)
def test_full_prefill_equals_transformers(pair_of: Callable[[str], Pair], name: str) -> None:
    pair = pair_of(name)
    expected = expected_logits(pair, name)
    run = PagedRun(pair.model, [random_tokens(length) for length in LENGTHS])
    logits = run.step(dict(enumerate(LENGTHS)))
    for s, rows in enumerate(expected):
        assert rows.std() > 0.5
        torch.testing.assert_close(logits[s], rows, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_and_decodes_in_one_batch_equal_transformers(pair_of: Callable[[str], Pair], name: str) -> None:
    pair = pair_of(name)
    expected = expected_logits(pair, name)
    run = PagedRun(pair.model, [random_tokens(length) for length in LENGTHS])
    # A chunk alone, two chunks, a decode beside a chunk, then decodes together, then one alone.
    steps = [{0: 13}, {0: 30, 1: 6}, {1: 1, 0: 5}, {0: 1, 1: 10}]
    steps += [{0: 1, 1: 1}] * (LENGTHS[1] - 17) + [{0: 1}] * (LENGTHS[0] - 49 - (LENGTHS[1] - 17))
    for logits, expectation in zip(run.steps(steps), expected, strict=True):
        torch.testing.assert_close(logits, expectation, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-mqa-biases", "qwen3"])
def test_half_precision_stays_near_float32(pair_of: Callable[[str], Pair], name: str, dtype: torch.dtype) -> None:
    pair = pair_of(name)
    tokens = random_tokens(20)
    expected = oracle_logits(pair.oracle, tokens)
    run = PagedRun(load_model(pair.directory, dtype, CPU), [tokens])
    logits = torch.cat([run.step({0: 19})[0], run.step({0: 1})[0]])
    assert logits.dtype is torch.float32
    error = (logits - expected).std() / expected.std()
    assert error < (0.05 if dtype is torch.bfloat16 else 0.01)


@pytest.mark.parametrize("name", ["qwen3", "llama-mqa-biases"])
def test_rotations_that_are_computed_when_a_sequence_reaches_them_change_nothing(
    pair_of: Callable[[str], Pair], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotations, "CHUNK", 16)
    pair, tokens = pair_of(name), random_tokens(LENGTHS[0])
    run = PagedRun(load_model(pair.directory, torch.float32, CPU), [tokens])
    logits = torch.cat([run.step({0: count})[0] for count in (13, 5, 1, LENGTHS[0] - 19)])
    torch.testing.assert_close(logits, oracle_logits(pair.oracle, tokens), atol=TOLERANCE, rtol=0)
