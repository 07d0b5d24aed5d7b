"""Families made of known parts against `transformers`: logits in chunks and decodes, greedy answers of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.families.composed_cases import CASES
from tests.gpu_worker.models.families.oracle_checks import (
    assert_answers_are_greedy,
    assert_logits_equal,
    assert_pressure_changes_no_answer,
)
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.pairs import CPU

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_a_family_equals_transformers(tmp_path: Path, name: str) -> None:
    oracle = save_case(CASES[name], tmp_path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)
    assert_answers_are_greedy(tmp_path, oracle)


@pytest.mark.parametrize("name", ["ernie-moe", "minimax-m2", "phimoe", "lfm2-moe"])
def test_pressure_changes_no_answer_over_a_cache_of_eight_bits(tmp_path: Path, name: str) -> None:
    save_case(CASES[name], tmp_path)
    assert_pressure_changes_no_answer(tmp_path, kv_cache_dtype="int8")
