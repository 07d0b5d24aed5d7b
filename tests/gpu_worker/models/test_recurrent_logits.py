"""Logits of models with recurrent layers against `transformers`: whole, in chunks, and with drafts that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu_worker.models.families.oracle_checks import (
    assert_answers_are_greedy,
    assert_logits_equal,
    assert_pressure_changes_no_answer,
)
from tests.gpu_worker.models.pairs import Pair, pair_maker
from tests.gpu_worker.models.recurrent_models import CASES, save_case

# A chunk alone, two chunks, a decode beside a chunk, then decodes together, then the rest of each.
STEPS = ({0: 13}, {0: 30, 1: 6}, {1: 1, 0: 5}, {0: 1, 1: 10}, *[{0: 1, 1: 1}] * 4, {1: 20}, {0: 17})


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return pair_maker(tmp_path_factory, save_case)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "-" in name else []) for name in CASES]
)
def test_chunks_and_decodes_in_one_batch_equal_transformers(pair_of: Callable[[str], Pair], name: str) -> None:
    pair = pair_of(name)
    assert_logits_equal(pair.model, pair.oracle, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_answers_of_the_engine_are_greedy(tmp_path: Path, name: str) -> None:
    oracle = save_case(name, tmp_path, eos_token_id=None)
    assert_answers_are_greedy(tmp_path, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_pressure_changes_no_answer_over_a_cache_of_eight_bits(tmp_path: Path, name: str, kv_cache_dtype: str) -> None:
    save_case(name, tmp_path, eos_token_id=None)
    assert_pressure_changes_no_answer(tmp_path, kv_cache_dtype=kv_cache_dtype)
