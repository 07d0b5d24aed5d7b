"""Ranks that divide sequences among them give the tokens of one process, and hold as many times more sequences."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.constraint import SharedConstraints
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.build_plan import make_plan
from gpu_worker.execution.ranks import group as group_module
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.models.loader import open_weights
from gpu_worker.speculative.ngram.proposer import NgramProposer
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import Outcome, answer, random_prompt
from tests.gpu_worker.execution.ranks.group_run import DEFAULTS, Run, started
from tests.gpu_worker.execution.ranks.test_group import assert_same, replace_rank, sequences
from tests.gpu_worker.execution.ranks.test_same_tokens import MODELS as FORMS
from tests.gpu_worker.execution.ranks.thread_ranks import ThreadGroup
from tests.gpu_worker.models.families.latent_cases import CASES as LATENT
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent

SIZES: dict[str, Any] = {"vocab_size": 100, "max_position_embeddings": 256, "eos_token_id": None}
MODELS = {
    "latent-experts": Case("DeepseekV3", {**LATENT["deepseek-v3"].options, **SIZES}),
    # Heads that two ranks could not divide.
    "three-heads": Case("Llama", {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1}),
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


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8"},
        {"enable_expert_parallel": True, "enable_eplb": True, "eplb_step_interval": 10, "num_redundant_experts": 2},
    ],
    ids=["8-bit-cache", "experts-that-move"],
)
def test_divided_sequences_with_an_8_bit_cache_or_moving_experts_give_the_tokens_of_one(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    is_cache = "kv_cache_dtype" in settings
    save_case(MODELS["three-heads" if is_cache else "latent-experts"], tmp_path)
    with started(tmp_path, 1, **{**OWN, **(settings if is_cache else {}), "enable_dp_attention": False}) as (alone, _):
        expected = alone.answer(sequences(14))
    with of_threads(tmp_path, 2, **settings) as run:
        assert_same(run.answer(sequences(14)), expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["gpt-oss-mxfp4", "gguf", "gptq", "gptq-act-order", "awq", "int8"])
def test_whole_attention_of_quantized_weights_gives_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    FORMS[name](tmp_path)
    with started(tmp_path, 1, **{**OWN, "enable_dp_attention": False}) as (alone, _):
        expected = alone.answer(sequences(14))
    with of_threads(tmp_path, 2) as run:
        assert_same(run.answer(sequences(14)), expected)


def test_two_ranks_hold_twice_as_many_sequences_as_one(tmp_path: Path) -> None:
    save_case(MODELS["latent-experts"], tmp_path)
    # Memory of a rank for two sequences; four come at once.
    own = RunnerConfig(tmp_path, **DEFAULTS, max_model_len=96)
    bounded = {"num_blocks": None, "kv_cache_bytes": 48 * make_plan(own).demand.block_bytes}
    ways = {"ranks with all latent vectors": {"enable_dp_attention": False}, "ranks that divide sequences": {}}
    preemptions = {}
    for name, settings in ways.items():
        with of_threads(tmp_path, 2, **bounded, **settings) as run:
            assert run.own.cache.num_blocks == 48
            assert run.own.num_blocks == 48 * run.own.num_parts
            preemptions[name] = run.answer(long_sequences(4)).num_preemptions
    assert preemptions["ranks with all latent vectors"] > preemptions["ranks that divide sequences"] == 0


def long_sequences(count: int) -> list[Sequence]:
    prompts = [random_prompt(60, seed=number) for number in range(count)]
    sampling = Sampling(temperature=0.0)
    return [Sequence(f"s{n}", prompt, 60, sampling, max_tokens=35, arrival=n) for n, prompt in enumerate(prompts)]


def test_prefix_is_found_in_the_part_that_has_it(tmp_path: Path) -> None:
    save_case(MODELS["three-heads"], tmp_path)
    with of_threads(tmp_path, 2) as run:
        engine = run.engine()
        first, again = (answer(engine, long_sequences(2), 1) for _ in range(2))
        assert again.tokens == first.tokens
        assert engine.stats.num_prefix_hits == 2 * 56
        engine.scheduler.check_integrity()


@pytest.mark.parametrize("experts", [False, True])
def test_attention_weights_are_counted_at_each_rank(experts: bool, tmp_path: Path) -> None:
    save_case(MODELS["latent-experts"], tmp_path)
    sizes = {}
    for is_own in (False, True):
        ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": experts, "enable_dp_attention": is_own}
        sizes[is_own] = make_plan(RunnerConfig(tmp_path, **DEFAULTS, **ranks)).weights_bytes
    with open_weights(tmp_path, torch.float32, torch.device("cpu")) as checkpoint:
        every = checkpoint.num_bytes_loaded("")
        matrices = every - checkpoint.num_bytes_loaded(r".*self_attn\.\w+_proj(_with_mqa)?\..*")
    assert sizes[True] == pytest.approx(sizes[False] + matrices / 2, abs=1)


def test_model_with_states_is_refused(tmp_path: Path) -> None:
    save_recurrent("lfm2", tmp_path)
    with pytest.raises(
        ConfigError, match="HEADRACE_ENABLE_DP_ATTENTION: is set, but states of recurrent layers are not"
    ):
        make_plan(RunnerConfig(tmp_path, **DEFAULTS, tensor_parallel_size=2, enable_dp_attention=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "size", "by_torch"), [("latent-experts", 2, True), ("latent-experts", 4, False)])
def test_groups_of_processes_divide_sequences(
    name: str, size: int, by_torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_torch:
        monkeypatch.setattr(group_module, "cpu_library", lambda: None)
    save_case(MODELS[name], tmp_path)
    with started(tmp_path, 1, **{**OWN, "enable_dp_attention": False}) as (alone, _):
        expected = answers(alone)
    with started(tmp_path, size, **OWN, enable_expert_parallel=True) as (run, _):
        for found, outcome in zip(answers(run, size), expected, strict=True):
            assert_same(found, outcome)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rank_that_is_killed_is_replaced_and_its_sequences_are_answered(tmp_path: Path) -> None:
    save_case(MODELS["latent-experts"], tmp_path)
    settings = {**OWN, "max_model_len": 256}
    with started(tmp_path, 1, **{**settings, "enable_dp_attention": False}) as (alone, _):
        expected = alone.answer(sequences(8))
    with started(tmp_path, 2, **settings) as (run, group):
        assert group is not None
        assert_same(run.answer(sequences(8)), expected)
        replace_rank(run, group, 1, signal.SIGKILL)
        assert_same(run.answer(sequences(8)), expected)
        assert [each.loads for each in group.readings()] == [1, 2]
