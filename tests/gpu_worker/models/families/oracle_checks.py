"""What each family is checked for against `transformers`: logits of mixed steps, and greedy answers of the engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.registry import read_model_config
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.variants import oracle_logits, random_tokens

# Models of other sizes and seeds may differ by more where they have states: `assert_file_equals` says why.
TOLERANCE = 1e-4
# A chunk alone, two chunks, a decode beside a chunk, chunks of other lengths, then decodes together.
STEPS = ({0: 13}, {0: 30, 1: 6}, {1: 1, 0: 5}, {0: 10, 1: 14}, {0: 1, 1: 1}, {0: 1, 1: 1})
GREEDY = Sampling(temperature=0.0, max_tokens=10)
_SHARED = random_prompt(24, seed=1)
PROMPTS = (_SHARED, random_prompt(37, seed=2), [*_SHARED[:20], *random_prompt(5, seed=3)], [*_SHARED, 5, 9])


def assert_logits_equal(model: CausalLM, oracle: Any, steps: Sequence[dict[int, int]] = STEPS) -> None:
    """Compare the logits of two sequences; each step maps a sequence to its number of tokens."""
    lengths = [sum(step.get(s, 0) for step in steps) for s in range(2)]
    logits = PagedRun(model, [random_tokens(length) for length in lengths]).steps(steps)
    for computed, length in zip(logits, lengths, strict=True):
        expected = oracle_logits(oracle, random_tokens(length))
        assert expected.std() > 0.5
        if (computed - expected).abs().max() > TOLERANCE:
            # Random experts and states may multiply rounding: then we may be twice as far from the truth as the oracle.
            exact = oracle_logits(in_float64(oracle), random_tokens(length))
            tolerance = max(TOLERANCE, 2 * float((expected - exact).abs().max()))
            torch.testing.assert_close(computed.double(), exact, atol=tolerance, rtol=0)


def in_float64(oracle: Any) -> Any:
    """Return a copy of a model that computes in float64."""
    exact = copy.deepcopy(oracle).double()
    exact.set_experts_implementation("eager")
    return exact


def assert_answers_are_greedy(directory: Path, oracle: Any) -> None:
    """Generate in small blocks with hits and preemptions; each token must be the oracle's after all before it."""
    answers = pressed_answers(make_runner(directory, max_model_len=64, dtype="float32"), directory)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([*prompt, *answer])
        expected = oracle_logits(oracle, tokens)[len(prompt) - 1 : -1].argmax(1)
        assert answer == expected.tolist()


def assert_pressure_changes_no_answer(directory: Path, **settings: Any) -> None:
    """Compare answers of sequences that run alone with those that hits, preemptions and chunks come to."""
    settings = {"max_model_len": 64, "dtype": "float32", **settings}
    runner = make_runner(directory, **settings)
    alone = [
        run(runner, [make_sequence("0", prompt, GREEDY)], enable_prefix_caching=False).tokens["0"] for prompt in PROMPTS
    ]
    assert pressed_answers(make_runner(directory, **settings), directory) == alone


def pressed_answers(runner: TorchModelRunner, directory: Path) -> list[list[int]]:
    """Answer the prompts in so little memory that sequences are preempted; some begin as others did."""
    sequences = [make_sequence(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    state = StateConfig(runner.num_state_slots, 2) if read_model_config(directory).has_states else None
    outcome = run(
        runner, sequences, num_blocks=17, token_budget=24, arrivals_per_step=2, headroom_tokens=1, state=state
    )
    assert outcome.num_prefix_hits > 0
    assert outcome.num_preemptions > 0
    return [outcome.tokens[str(i)] for i in range(len(PROMPTS))]
