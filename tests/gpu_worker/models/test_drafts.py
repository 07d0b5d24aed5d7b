"""Families of every mechanism in the real engine: drafts, caches of eight bits and hits leave answers as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.draft import Draft
from gpu_worker.models.registry import read_model_config
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.models import recurrent_models
from tests.gpu_worker.models.families.composed_cases import CASES as COMPOSED
from tests.gpu_worker.models.families.dense_cases import CASES as DENSE
from tests.gpu_worker.models.families.mixture_cases import CASES as MIXTURES
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.speculative.draft_files import eagle_config, eagle_tensors, save_draft
from tests.gpu_worker.speculative.recorder import recorded_runner

pytestmark = pytest.mark.slow

CASES = {
    **DENSE,
    **{name: MIXTURES[name] for name in ("gemma4-moe", "llama4")},
    **{name: COMPOSED[name] for name in ("hy-v3", "afmoe", "gpt2", "opt", "apertus", "mimo-v2")},
}
RECURRENT = recurrent_models.CASES
GREEDY = Sampling(temperature=0.0, max_tokens=16)
# What repeats is what n-grams propose.
REPEATING = [random_prompt(6, seed=length) * 4 + random_prompt(length, seed=length) for length in (3, 9, 17)]
PROMPTS = [*REPEATING, *(random_prompt(length, seed=length) for length in (9, 24, 37))]


def save(name: str, directory: Path) -> None:
    """Save a random model that never ends a text by itself."""
    if name in RECURRENT:
        recurrent_models.save_case(name, directory, eos_token_id=None)
    else:
        save_case(CASES[name], directory)


def answers(runner: Any, **options: Any) -> dict[str, list[int]]:
    sequences = [make_sequence(str(index), prompt, GREEDY) for index, prompt in enumerate(PROMPTS)]
    return run(runner, sequences, token_budget=24, **options).tokens


def proposers(model: Path, drafts: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of each proposer, with random weights of their own where they have any."""
    config = read_model_config(model)
    size, vocab = config.hidden_size, config.vocab_size
    save_draft(drafts / "eagle", eagle_config(size, vocab), eagle_tensors(size))
    return {"ngram": {}, "draft": {"draft_model": model}, "eagle": {"draft_model": drafts / "eagle"}}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *((name, ("ngram", "draft", "eagle")) for name in CASES),
        *((name, ("eagle",)) for name in ("qwen3_5", "lfm2", "falcon_h1", "nemotron_h", "mamba2")),
    ],
)
def test_drafts_change_no_answer(tmp_path: Path, name: str, kinds: tuple[str, ...]) -> None:
    directory = tmp_path / "model"
    save(name, directory)
    settings = proposers(directory, tmp_path)
    plain = answers(make_runner(directory), enable_prefix_caching=False)
    for kind in kinds:
        drafted: list[int] = []

        def count(_: object, made: Draft, drafted: list[int] = drafted) -> None:
            drafted.append(len(made))

        runner, recorder = recorded_runner(directory, count, speculative=kind, **settings[kind])
        assert answers(runner, policy=FixedDepth(3), enable_prefix_caching=False) == plain, kind
        assert not recorder.failures
        assert kind == "ngram" or sum(drafted) > 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in CASES for dtype in ("auto", "int8")),
        *((name, "int8") for name in ("falcon_h1", "nemotron_h", "granite_moe_hybrid")),
    ],
)
def test_eight_bits_and_resumption_change_no_answer(tmp_path: Path, name: str, dtype: str) -> None:
    save(name, tmp_path)
    plain = answers(make_runner(tmp_path, kv_cache_dtype=dtype), enable_prefix_caching=False)
    for index, prompt in enumerate(PROMPTS):
        tokens = plain[str(index)]
        again = make_sequence("again", prompt, GREEDY, tuple(tokens[:5]))
        runner = make_runner(tmp_path, kv_cache_dtype=dtype)
        assert run(runner, [again], enable_prefix_caching=False).tokens["again"] == tokens[5:]
