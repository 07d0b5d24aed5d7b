"""Models with recurrent layers in the real engine: mixed batches, preemption, resumption, drafts."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.runner import TorchModelRunner
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.drafts.scripted_proposers import ChainProposer
from tests.gpu_worker.execution.engine_run import (
    VOCAB,
    greedy_by_transformers,
    make_runner,
    make_sequence,
    random_prompt,
    run,
)
from tests.gpu_worker.models.recurrent_models import save_case

SLOW_MODELS = ["nemotron_h", "mamba2", "qwen3_next", "qwen3_5_moe"]
LENGTHS = [1, 3, 17, 40, 9, 26]
COUNT = 12


MODELS = ["qwen3_5", "lfm2", "falcon_h1", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_MODELS)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("recurrent-model")
    return directory, save_case(request.param, directory, eos_token_id=None)


@pytest.fixture(scope="module")
def runner(model: tuple[Path, Any]) -> TorchModelRunner:
    return make_runner(model[0], max_num_seqs=6, max_draft_tokens=5)


@pytest.fixture(scope="module")
def expected(model: tuple[Path, Any]) -> dict[str, list[int]]:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    return {str(index): greedy_by_transformers(model[1], prompt, COUNT) for index, prompt in enumerate(prompts)}


def sequences(emitted: dict[str, list[int]] | None = None, **sampling: Any) -> list[Sequence]:
    wanted = Sampling(**{"temperature": 0.0, "max_tokens": COUNT, **sampling})
    given = {str(index): tuple((emitted or {}).get(str(index), ())) for index in range(len(LENGTHS))}
    return [
        make_sequence(str(index), random_prompt(length, seed=length), wanted, given[str(index)])
        for index, length in enumerate(LENGTHS)
    ]


def test_mixed_batches_equal_transformers(runner: TorchModelRunner, expected: dict[str, list[int]]) -> None:
    outcome = run(runner, sequences(), token_budget=11, arrivals_per_step=2, enable_prefix_caching=False)
    assert outcome.tokens == expected


def test_tokens_after_preemption_equal_transformers(runner: TorchModelRunner, expected: dict[str, list[int]]) -> None:
    outcome = run(runner, sequences(), num_blocks=26, headroom_tokens=0, enable_prefix_caching=False)
    assert outcome.num_preemptions > 0
    assert outcome.tokens == expected


def test_resumed_sequences_go_on_as_they_would_have(runner: TorchModelRunner, expected: dict[str, list[int]]) -> None:
    emitted = {name: tokens[: int(name) + 1] for name, tokens in expected.items()}
    outcome = run(runner, sequences(emitted), token_budget=30, enable_prefix_caching=False)
    assert outcome.tokens == {name: tokens[int(name) + 1 :] for name, tokens in expected.items()}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_of_any_quality_leave_tokens_as_they_are(runner: TorchModelRunner, temperature: float) -> None:
    sampling = {"temperature": temperature, "seed": 5}
    plain = run(runner, sequences(**sampling), enable_prefix_caching=False)
    runner.verify_drafts_of(ChainProposer(plain.tokens, 0.7))
    try:
        outcome = run(
            runner, sequences(**sampling), policy=FixedDepth(5), token_budget=200, enable_prefix_caching=False
        )
    finally:
        runner.verify_drafts_of(None)
    assert outcome.num_steps < plain.num_steps
    assert outcome.tokens == plain.tokens


class KnownAnswer:
    """A constraint that the model would keep by itself: it allows every token, and forces those of a known answer."""

    error = None
    is_at_fault = False
    is_complete = False

    def __init__(self, answer: list[int]) -> None:
        self.coming = answer

    def advance(self, token_id: int) -> bool:
        del token_id
        self.coming = self.coming[1:]
        return True

    def advance_inside(self, token_id: int) -> bool:
        return self.advance(token_id)

    def fill_mask(self, drafts: tuple[int, ...], address: int) -> None:
        del drafts
        ctypes.memset(address, 0xFF, 4 * -(-VOCAB // 32))

    def allows(self, drafts: tuple[int, ...]) -> bool:
        return bool(drafts)

    def forced_tokens(self) -> list[int]:
        return self.coming[:5]

    def some_allowed(self, number: int) -> int:
        return number % VOCAB


@pytest.mark.parametrize("max_draft_tokens", [0, 3])
def test_more_forced_tokens_than_drafts_are_kept_leave_tokens_as_they_are(
    model: tuple[Path, Any], expected: dict[str, list[int]], max_draft_tokens: int
) -> None:
    runner = make_runner(model[0], max_num_seqs=6, max_draft_tokens=max_draft_tokens)
    forced = sequences()
    for sequence in forced:
        sequence.constraint = KnownAnswer(expected[sequence.id])
    outcome = run(runner, forced, token_budget=200, enable_prefix_caching=False)
    assert outcome.tokens == expected


def one(name: str, prompt: list[int]) -> Sequence:
    return make_sequence(name, prompt, Sampling(temperature=0.0, max_tokens=3))


@pytest.mark.parametrize("token_budget", [7, 64])
def test_hits_equal_cold_starts_for_every_split_of_prefix_and_suffix(
    runner: TorchModelRunner, token_budget: int
) -> None:
    prompt = random_prompt(27, seed=3)
    cold = run(runner, [one("cold", prompt)], enable_prefix_caching=False).tokens["cold"]
    for length in range(1, len(prompt) + 1):
        # Another worker computed the first tokens; they continue differently there.
        first = one("first", [*prompt[:length], 96 - prompt[length - 1]])
        sequences = [first, one("again", prompt)]
        outcome = run(runner, sequences, state=StateConfig(9, 2), token_budget=token_budget, max_num_seqs=1)
        assert outcome.tokens["again"] == cold
        assert outcome.num_prefix_hits == (length // 4 * 4 if length < 27 else 24)
