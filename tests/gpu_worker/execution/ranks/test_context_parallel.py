"""Ranks that share the tokens of sequences give the tokens of one process, and hold longer sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.build_plan import make_plan
from gpu_worker.execution.ranks import group as group_module
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.speculative.ngram.proposer import NgramProposer
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import random_prompt
from tests.gpu_worker.execution.ranks.group_run import started
from tests.gpu_worker.execution.ranks.test_group import assert_same, check, sequences
from tests.gpu_worker.execution.ranks.test_same_tokens import SIZES
from tests.gpu_worker.models.families.random_models import Case, save_case

CONTEXT = {"decode_context_parallel_size": 2}


def long_sequences() -> list[Sequence]:
    """Two that begin alike, greedy and drawn, of 200 tokens each."""
    prompt = random_prompt(150, seed=1)
    samplings = Sampling(temperature=0.0, logprobs=2), Sampling(temperature=0.8, seed=3)
    return [Sequence(f"s{n}", [*prompt, n], 151, each, max_tokens=49) for n, each in enumerate(samplings)]


def test_a_sequence_is_longer_than_the_memory_of_a_rank(tmp_path: Path) -> None:
    save_case(Case("Llama", {**SIZES, "num_key_value_heads": 1}), tmp_path)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 200, "max_draft_tokens": 0}
    with started(tmp_path, 1, **settings) as (alone, _):
        expected = alone.answer(long_sequences())
        preempted = alone.answer(sequences(4), num_blocks=32)
    bounded = settings | {"num_blocks": None, "kv_cache_bytes": 120 * bytes_a_token(tmp_path)}
    for size in (1, 2):
        # Each rank has the one key and value head, so that two hold no more than one.
        with pytest.raises(ConfigError, match="would hold 120 tokens, but a sequence may have 200"):
            make_plan(RunnerConfig(tmp_path, block_size=4, **bounded, tensor_parallel_size=size))
    with started(tmp_path, 2, **bounded, **CONTEXT) as (run, _):
        assert run.own.num_blocks == 60
        assert_same(run.answer(long_sequences()), expected)
        assert_same(run.answer(sequences(4), num_blocks=32), preempted)
    assert [len(tokens) for tokens in expected.tokens.values()] == [49, 49]


def bytes_a_token(directory: Path) -> int:
    config = RunnerConfig(directory, block_size=1, num_blocks=1000)
    return make_plan(config).demand.block_bytes


@pytest.mark.slow
def test_ranks_that_share_tokens_are_replaced(directory: Path) -> None:
    check(directory, 2, **CONTEXT)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_groups_of_ranks_that_meet_by_torch_share_tokens(
    kv_cache_dtype: str, block_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, of which two and two have the same key and value heads."""
    monkeypatch.setattr(group_module, "cpu_library", lambda: None)
    save_case(Case("Llama", {**SIZES, "sliding_window": None}), tmp_path)
    # A last bit decides to which of 255 numbers a key is rounded.
    tolerance = 1e-4 if kv_cache_dtype == "auto" else 1e-3
    settings = {"kv_cache_dtype": kv_cache_dtype, "block_size": block_size, "max_model_len": 256}
    ways = ({}, {"proposer": NgramProposer(100_000)})
    with started(tmp_path, 1, **settings) as (alone, _):
        expected = [alone.answer(sequences(), **way) for way in ways]
    with started(tmp_path, 4, **settings, **CONTEXT) as (run, _):
        for way, outcome in zip(ways, expected, strict=True):
            assert_same(run.answer(sequences(), **way), outcome, tolerance)
