"""Layers that are divided among stages give the tokens of one process, with as many plans in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.execution.build_plan import make_plan
from gpu_worker.execution.runner_config import RunnerConfig
from shared.errors import ConfigError
from tests.gpu_worker.execution.engine_run import Outcome
from tests.gpu_worker.execution.ranks.group_run import started
from tests.gpu_worker.execution.ranks.test_group import assert_same, sequences
from tests.gpu_worker.execution.ranks.test_same_tokens import MODELS, SIZES
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_draft_tokens": 0}
WAYS: tuple[dict[str, Any], ...] = ({}, {"num_blocks": 32})


def answers(directory: Path, size: int, **settings: Any) -> list[Outcome]:
    with started(directory, size, **SETTINGS, **settings) as (run, _):
        return [run.answer(sequences(), **way) for way in WAYS]


def check(directory: Path, size: int, num_stages: int, **settings: Any) -> None:
    expected = answers(directory, 1)
    found_ones = answers(directory, size, pipeline_parallel_size=num_stages, **settings)
    for found, one in zip(found_ones, expected, strict=True):
        assert_same(found, one)
    assert expected[1].num_preemptions > 0


def test_two_stages_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    save_case(Case("Llama", {**SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True}), tmp_path)
    check(tmp_path, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("context_size", [1, 2])
@pytest.mark.parametrize("name", ["windows", "latent", "gptq", "gguf", "one-kv-head"])
def test_two_stages_of_two_ranks_give_the_tokens_of_one_process(name: str, context_size: int, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    check(tmp_path, 2, 2, decode_context_parallel_size=context_size)


@pytest.mark.slow
def test_three_stages_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    save_case(Case("Llama", {**SIZES, "num_hidden_layers": 4}), tmp_path)
    check(tmp_path, 1, 3)


def refusal(directory: Path, count: int, **settings: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        make_plan(RunnerConfig(directory, **{**SETTINGS, **settings}, pipeline_parallel_size=count))
    return str(raised.value)


def test_what_does_not_go_with_stages_is_refused(tmp_path: Path) -> None:
    save_case(Case("Llama", {**SIZES, "num_hidden_layers": 2}), tmp_path)
    assert "HEADRACE_PIPELINE_PARALLEL_SIZE: is 3: the model has 2 layers" in refusal(tmp_path, 3)
    assert "is 2: drafts (HEADRACE_SPECULATIVE) need a pipeline of one stage" in refusal(
        tmp_path, 2, max_draft_tokens=4
    )


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    save_recurrent("lfm2", tmp_path)
    assert "models with recurrent layers" in refusal(tmp_path, 2)
