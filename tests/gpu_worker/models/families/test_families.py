"""Families against `transformers`: logits in chunks and decodes, and greedy answers of the real engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.layers.placed_experts import ExpertLoad
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from tests.gpu_worker.models.families import composed_cases, dense_cases, latent_cases, mixture_cases
from tests.gpu_worker.models.families.oracle_checks import (
    assert_answers_are_greedy,
    assert_logits_equal,
    assert_pressure_changes_no_answer,
)
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.variants import oracle_logits, random_tokens

# One of each family that has a mechanism of its own, then other options, and families made of known parts.
FAST = {**dense_cases.CASES, **mixture_cases.CASES, **latent_cases.CASES}
SLOW = {**dense_cases.MORE_CASES, **mixture_cases.MORE_CASES, **latent_cases.MORE_CASES, **composed_cases.CASES}
CASES = {**FAST, **SLOW}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [*FAST, *map(slow, SLOW)])
def test_a_family_equals_transformers(tmp_path: Path, name: str) -> None:
    oracle = save_case(CASES[name], tmp_path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)
    assert_answers_are_greedy(tmp_path, oracle)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        *(("gemma3", 0.05), ("cohere2", 0.05), ("glm4", 0.05), slow("nemotron", 0.3), slow("gpt2", 0.3)),
        # Some tokens fall on other experts.
        *(slow(name, 0.3) for name in ("phimoe", "minimax-m2", "afmoe", "opt", "apertus")),
    ],
)
def test_sixteen_bits_stay_near_float32(tmp_path: Path, name: str, tolerance: float) -> None:
    oracle = save_case(replace(CASES[name], dtype=torch.bfloat16), tmp_path)
    run = PagedRun(load_model(tmp_path, torch.bfloat16, CPU), [tokens := random_tokens(20)])
    logits = torch.cat([run.step({0: 19})[0], run.step({0: 1})[0]])
    expected = oracle_logits(oracle, tokens)
    assert (logits - expected).std() / expected.std() < tolerance


EIGHT_BITS = (
    *("ernie-moe", "minimax-m2", "phimoe", "lfm2-moe", "gpt-neox", "hunyuan", "hy-v3", "afmoe", "gpt2", "opt"),
    *("apertus", "mimo-v2", "granite-swa-thetas", "cohere2-moe-options", "mellum-windows", *latent_cases.CASES),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "int8") for name in EIGHT_BITS), *((name, "fp8") for name in latent_cases.CASES)]
)
def test_pressure_changes_no_answer_over_a_cache_of_eight_bits(tmp_path: Path, name: str, dtype: str) -> None:
    save_case(CASES[name], tmp_path)
    assert_pressure_changes_no_answer(tmp_path, kv_cache_dtype=dtype)


def test_tokens_of_experts_are_counted(tmp_path: Path) -> None:
    save_case(CASES["qwen3-moe"], tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)
    loads = model.expert_loads()
    assert loads is not None
    assert loads.read() == ExpertLoad(tokens=0, imbalance=0.0, unused=7)
    PagedRun(model, [random_tokens(30)]).step({0: 30})
    load = loads.read()
    # The first of the two layers is dense, and a token gets three of the other's seven experts.
    assert load.tokens == 30 * 3
    assert 1 < load.imbalance <= 7 / 3
    assert load.unused < 4


def test_chunks_keep_the_last_tokens_and_layers_without_rotation_all(tmp_path: Path) -> None:
    save_case(CASES["llama4"], tmp_path)
    layout = read_model_config(tmp_path).cache_layout
    assert [(group.window, group.layers) for group in layout.groups] == [(None, (1,)), (11, (0, 2))]
