"""Mixtures of experts against `transformers`: logits in chunks and decodes, and greedy answers of the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.layers.expert_loads import ExpertLoad
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from tests.gpu_worker.models.families.mixture_cases import CASES, MORE_CASES
from tests.gpu_worker.models.families.oracle_checks import assert_answers_are_greedy, assert_logits_equal
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.variants import random_tokens


@pytest.mark.parametrize("name", CASES)
def test_a_family_equals_transformers(tmp_path: Path, name: str) -> None:
    oracle = save_case(CASES[name], tmp_path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)
    assert_answers_are_greedy(tmp_path, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_CASES)
def test_other_options_and_names_equal_transformers(tmp_path: Path, name: str) -> None:
    oracle = save_case(MORE_CASES[name], tmp_path)
    assert_logits_equal(load_model(tmp_path, torch.float32, CPU), oracle)
    assert_answers_are_greedy(tmp_path, oracle)


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
