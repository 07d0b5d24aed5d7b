"""Families made of known parts against `transformers`: logits in chunks and decodes, greedy answers of the engine."""

from __future__ import annotations

from dataclasses import replace
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
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.variants import oracle_logits, random_tokens

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_a_family_equals_transformers(tmp_path: Path, name: str) -> None:
    oracle = save_case(CASES[name], tmp_path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)
    assert_answers_are_greedy(tmp_path, oracle)


@pytest.mark.parametrize(
    "name",
    [
        "ernie-moe",
        "minimax-m2",
        "phimoe",
        "lfm2-moe",
        "gpt-neox",
        "hunyuan",
        "hy-v3",
        "afmoe",
        "gpt2",
        "opt",
        "apertus",
        "mimo-v2",
        "granite-swa-thetas",
        "cohere2-moe-options",
        "mellum-windows",
    ],
)
def test_pressure_changes_no_answer_over_a_cache_of_eight_bits(tmp_path: Path, name: str) -> None:
    save_case(CASES[name], tmp_path)
    assert_pressure_changes_no_answer(tmp_path, kv_cache_dtype="int8")


@pytest.mark.parametrize("name", ["nemotron", "phimoe", "minimax-m2", "afmoe", "gpt2", "opt", "apertus"])
def test_sixteen_bits_stay_near_float32(tmp_path: Path, name: str) -> None:
    oracle = save_case(replace(CASES[name], dtype=torch.bfloat16), tmp_path)
    run = PagedRun(load_model(tmp_path, torch.bfloat16, CPU), [tokens := random_tokens(20)])
    logits = torch.cat([run.step({0: 19})[0], run.step({0: 1})[0]])
    expected = oracle_logits(oracle, tokens)
    # Some tokens fall on other experts.
    assert (logits - expected).std() / expected.std() < 0.3
