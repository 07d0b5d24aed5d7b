"""Ranks that divide sequences among them give the tokens of one process, and hold as many times more sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.constraint import SharedConstraints
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.speculative.ngram.proposer import NgramProposer
from tests.gpu_worker.execution.engine_run import Outcome
from tests.gpu_worker.execution.ranks.group_run import DEFAULTS, Run, started
from tests.gpu_worker.execution.ranks.test_group import assert_same, sequences
from tests.gpu_worker.execution.ranks.thread_ranks import ThreadGroup
from tests.gpu_worker.models.families.latent_cases import CASES as LATENT
from tests.gpu_worker.models.families.random_models import Case, save_case

SIZES: dict[str, Any] = {"vocab_size": 100, "max_position_embeddings": 256, "eos_token_id": None}
MODELS = {
    "latent-experts": Case("DeepseekV3", {**LATENT["deepseek-v3"].options, **SIZES}),
    "one-kv-head": Case("Llama", {**SIZES, "num_key_value_heads": 1}),
    "windows": Case("Mistral", {**SIZES, "sliding_window": 10}),
}
OWN: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "enable_dp_attention": True}
# With room, with preemptions (a part of 24 blocks has room for a sequence of 96 tokens), and with drafts.
WAYS: tuple[dict[str, Any], ...] = ({}, {"num_blocks": 24}, {"proposer": True})


def answers(run: Run, num_parts: int = 1) -> list[Outcome]:
    found = []
    for way in WAYS:
        options = {**way, "proposer": NgramProposer(100_000)} if "proposer" in way else dict(way)
        if "num_blocks" in options:
            options["num_blocks"] *= num_parts
        found.append(run.answer(sequences(14), **options))
    return found


@contextmanager
def of_threads(directory: Path, size: int, **settings: Any) -> Iterator[Run]:
    constraints = SharedConstraints()
    config = RunnerConfig(directory, **{**DEFAULTS, **OWN, **settings}, tensor_parallel_size=size)
    group = ThreadGroup(config, constraints)
    try:
        yield Run(group.runners[0], group, constraints)
    finally:
        group.close()


@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_divide_sequences_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    save_case(MODELS[name], tmp_path)
    with started(tmp_path, 1, **{**OWN, "enable_dp_attention": False}) as (alone, _):
        expected = answers(alone)
    with of_threads(tmp_path, 2, enable_expert_parallel=name == "latent-experts") as run:
        for found, outcome in zip(answers(run, 2), expected, strict=True):
            assert_same(found, outcome)
            assert bool(found.num_preemptions) == bool(outcome.num_preemptions)
        assert run.runner.parts == {0, 1}
