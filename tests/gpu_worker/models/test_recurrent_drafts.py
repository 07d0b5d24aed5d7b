"""Every recurrent family in the real engine: n-grams, caches of eight bits and hits leave answers as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.draft import Draft
from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.models.registry import read_model_config
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.models.recurrent_models import CASES, save_case
from tests.gpu_worker.speculative.draft_files import (
    eagle_config,
    eagle_tensors,
    medusa_config,
    medusa_tensors,
    save_draft,
)
from tests.gpu_worker.speculative.recorder import recorded_runner

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0.0, max_tokens=16)
# What repeats is what n-grams propose.
PROMPTS = [random_prompt(6, seed=length) * 4 + random_prompt(length, seed=length) for length in (3, 9, 17)]


def answers(runner: Any, **options: Any) -> dict[str, list[int]]:
    sequences = [make_sequence(str(index), prompt, GREEDY) for index, prompt in enumerate(PROMPTS)]
    return run(runner, sequences, token_budget=24, **options).tokens


@pytest.mark.parametrize("name", CASES)
def test_ngrams_and_hits_change_no_answer(tmp_path: Path, name: str) -> None:
    save_case(name, tmp_path, eos_token_id=None)
    runner, recorder = recorded_runner(tmp_path, lambda *_: None, speculative="ngram")
    plain = answers(make_runner(tmp_path), enable_prefix_caching=False)
    assert answers(runner, policy=FixedDepth(3), enable_prefix_caching=False) == plain
    assert not recorder.failures
    state = StateConfig(num_slots=12, interval_blocks=2)
    sequences = [make_sequence(f"{turn}{index}", PROMPTS[index], GREEDY) for turn in "ab" for index in range(3)]
    outcome = run(runner, sequences, policy=FixedDepth(3), token_budget=24, max_num_seqs=1, state=state)
    assert outcome.num_prefix_hits > 0
    assert outcome.tokens == {f"{turn}{index}": plain[str(index)] for turn in "ab" for index in range(3)}


@pytest.mark.parametrize("proposer", ["eagle", "medusa"])
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1", "nemotron_h", "mamba2"])
def test_heads_that_were_trained_for_the_model_change_no_answer(tmp_path: Path, name: str, proposer: str) -> None:
    directory, draft = tmp_path / "model", tmp_path / "draft"
    save_case(name, directory, eos_token_id=None)
    config = read_model_config(directory)
    if proposer == "eagle":
        save_draft(draft, eagle_config(config.hidden_size, config.vocab_size), eagle_tensors(config.hidden_size))
    else:
        heads = medusa_tensors(3, 1, config.hidden_size, config.vocab_size, set())
        save_draft(draft, medusa_config(3, 1), heads)
    drafted: list[int] = []

    def count(_: object, made: Draft) -> None:
        drafted.append(len(made))

    runner, recorder = recorded_runner(directory, count, speculative=proposer, draft_model=draft)
    plain = answers(make_runner(directory), enable_prefix_caching=False)
    assert answers(runner, policy=FixedDepth(3), enable_prefix_caching=False) == plain
    assert not recorder.failures
    assert sum(drafted) > 0


@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h", "granite_moe_hybrid"])
def test_eight_bits_and_resumption_change_no_answer(tmp_path: Path, name: str) -> None:
    save_case(name, tmp_path, eos_token_id=None)
    plain = answers(make_runner(tmp_path, kv_cache_dtype="int8"), enable_prefix_caching=False)
    for index, prompt in enumerate(PROMPTS):
        tokens = plain[str(index)]
        again = make_sequence("again", prompt, GREEDY, tuple(tokens[:5]))
        runner = make_runner(tmp_path, kv_cache_dtype="int8")
        assert run(runner, [again], enable_prefix_caching=False).tokens["again"] == tokens[5:]
