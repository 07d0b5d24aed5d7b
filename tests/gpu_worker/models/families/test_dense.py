"""Dense families against `transformers`: logits in chunks and decodes, and greedy answers of the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.families.dense_cases import CASES, MORE_CASES
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.families.test_mixtures import assert_answers_are_greedy, assert_logits_equal
from tests.gpu_worker.models.pairs import CPU


@pytest.mark.parametrize("name", CASES)
def test_a_family_equals_transformers(tmp_path: Path, name: str) -> None:
    oracle = save_case(CASES[name], tmp_path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)
    assert_answers_are_greedy(tmp_path, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_other_options_equal_transformers(tmp_path: Path, name: str) -> None:
    oracle = save_case(MORE_CASES[name], tmp_path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)
    assert_answers_are_greedy(tmp_path, oracle)
