"""Families with mechanisms of their own: drafts, caches of eight bits and resumption leave answers as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.models.families.composed_cases import CASES as COMPOSED
from tests.gpu_worker.models.families.dense_cases import CASES as DENSE
from tests.gpu_worker.models.families.mixture_cases import CASES as MIXTURES
from tests.gpu_worker.models.families.random_models import SIZES, save_case
from tests.gpu_worker.speculative.draft_files import (
    eagle_config,
    eagle_tensors,
    medusa_config,
    medusa_tensors,
    save_draft,
)
from tests.gpu_worker.speculative.recorder import recorded_runner

pytestmark = pytest.mark.slow

CASES = {
    **DENSE,
    **{name: MIXTURES[name] for name in ("gemma4-moe", "llama4")},
    **{name: COMPOSED[name] for name in ("hy-v3", "afmoe", "gpt2", "opt", "apertus", "mimo-v2")},
}
GREEDY = Sampling(temperature=0.0, max_tokens=12)
PROMPTS = [random_prompt(length, seed=length) for length in (9, 24, 37)]


def answers(runner: Any, **options: Any) -> dict[str, list[int]]:
    sequences = [make_sequence(str(index), prompt, GREEDY) for index, prompt in enumerate(PROMPTS)]
    return run(runner, sequences, token_budget=24, **options).tokens


@pytest.fixture
def drafts(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The settings of each proposer, with random weights of their own where they have any."""
    size, vocab = SIZES["hidden_size"], SIZES["vocab_size"]
    eagle, medusa = tmp_path / "eagle", tmp_path / "medusa"
    save_draft(eagle, eagle_config(size, vocab), eagle_tensors(size))
    save_draft(medusa, medusa_config(3, 1), medusa_tensors(3, 1, size, vocab, set()))
    return {
        "ngram": {},
        "self": {"self_speculation_layers": 1},
        "draft": {"draft_model": tmp_path / "model"},
        "eagle": {"draft_model": eagle},
        "medusa": {"draft_model": medusa},
    }


@pytest.mark.parametrize("name", CASES)
def test_drafts_change_no_answer(tmp_path: Path, name: str, drafts: dict[str, dict[str, Any]]) -> None:
    directory = tmp_path / "model"
    save_case(CASES[name], directory)
    plain = answers(make_runner(directory))
    for proposer, settings in drafts.items():
        runner, recorder = recorded_runner(directory, lambda *_: None, speculative=proposer, **settings)
        assert answers(runner, policy=FixedDepth(3)) == plain, proposer
        assert not recorder.failures


@pytest.mark.parametrize("name", CASES)
def test_eight_bits_and_resumption_change_no_answer(tmp_path: Path, name: str) -> None:
    save_case(CASES[name], tmp_path)
    for dtype in ("auto", "int8"):
        plain = answers(make_runner(tmp_path, kv_cache_dtype=dtype))
        for index, prompt in enumerate(PROMPTS):
            tokens = plain[str(index)]
            again = make_sequence("again", prompt, GREEDY, tuple(tokens[:5]))
            runner = make_runner(tmp_path, kv_cache_dtype=dtype)
            assert run(runner, [again], enable_prefix_caching=False).tokens["again"] == tokens[5:]
