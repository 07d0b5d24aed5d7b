"""Models with recurrent layers in the real engine: mixed batches, preemption, resumption, drafts.

Steps that copy states on their way are replayed as all others: copies have places in a captured step.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.batch.graph_shapes import GraphShape
from gpu_worker.execution.batch.graphs import ComputedRows, StepGraphs
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.decoder import CausalLM
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import TOKEN_BUDGET, load, make_device_runner
from tests.gpu_worker.execution.drafts.scripted_proposers import ChainProposer
from tests.gpu_worker.execution.engine_run import (
    VOCAB,
    Outcome,
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


NUM_SEQS, NUM_SLOTS = 6, 14
GREEDY = Sampling(temperature=0.0, max_tokens=9)


def graphs_make_runner(model: CausalLM, *, is_graphed: bool) -> TorchModelRunner:
    sizes = {"max_num_seqs": NUM_SEQS, "max_model_len": 64, "num_state_slots": NUM_SLOTS}
    return make_device_runner(model, is_graphed=is_graphed, num_blocks=200, **sizes)


def graphs_sequences(turn: int) -> list[Sequence]:
    """Prompts of which some begin alike, and in the second turn as in the first."""
    common = random_prompt(18, seed=1)
    tails = [random_prompt(length, seed=length + turn) for length in (3, 9, 30)]
    prompts = [[*common, *tail] for tail in tails] + [random_prompt(21, seed=2)]
    return [make_sequence(f"{turn}-{index}", prompt, GREEDY) for index, prompt in enumerate(prompts)]


def answer(runner: TorchModelRunner) -> Outcome:
    limits = {"token_budget": TOKEN_BUDGET, "max_num_seqs": NUM_SEQS, "arrivals_per_step": 1}
    return run(runner, [*graphs_sequences(0), *graphs_sequences(1)], state=StateConfig(NUM_SLOTS, 2), **limits)


class CountedGraphs:
    """Lets steps run, and counts those that copy states."""

    def __init__(self, graphs: StepGraphs) -> None:
        self._run = graphs.run
        self.num_copying: dict[bool, int] = {True: 0, False: 0}

    def run(self, shape: GraphShape, layout: HostStep) -> ComputedRows:
        if layout.save_starts is not None:
            self.num_copying[shape.has_logits] += 1
        return self._run(shape, layout)


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5", "falcon_h1", "mamba2"))]
)
def test_steps_that_copy_states_are_replayed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_case(name, tmp_path, eos_token_id=None)
    model = load(tmp_path, "cpu")
    expected = answer(graphs_make_runner(model, is_graphed=False))
    runner = graphs_make_runner(model, is_graphed=True)
    monkeypatch.setattr(runner, "_launch", lambda *_: pytest.fail("launched one kernel after the other"))
    graphs = runner._graphs
    assert graphs is not None
    counted = CountedGraphs(graphs)
    monkeypatch.setattr(graphs, "run", counted.run)
    outcome = answer(runner)
    assert outcome.tokens == expected.tokens
    assert outcome.num_prefix_hits == expected.num_prefix_hits > 0
    # Both of decodes, at the ends of blocks, and of steps with prompt tokens.
    assert min(counted.num_copying.values()) > 0
