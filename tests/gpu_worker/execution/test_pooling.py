"""Vectors and scores of prompts against `transformers`: chunked, preempted, beside generation, and as graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.batch.graph_shapes import CapturedSteps
from gpu_worker.execution.runner import TorchModelRunner
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import load, make_device_runner
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.execution.pooled_sequences import answer, assert_vectors, sequence_of

LENGTHS = (1, 5, 40, 90, 150)
MEAN, LAST, FIRST = PoolingPlan("mean"), PoolingPlan("last"), PoolingPlan("first")


@pytest.fixture(scope="module")
def runner(tiny: tuple[Path, Any]) -> TorchModelRunner:
    return make_runner(tiny[0])


def mixture() -> list[Sequence]:
    plans = (MEAN, LAST, FIRST, PoolingPlan("last", (3, 7)))
    return [
        sequence_of(f"{length}-{number}", random_prompt(length, length), plan)
        for length in LENGTHS
        for number, plan in enumerate(plans)
    ]


@pytest.mark.parametrize("token_budget", [512, 23])
def test_prompts_in_one_step_or_in_chunks_equal_transformers(
    tiny: tuple[Path, Any], runner: TorchModelRunner, token_budget: int
) -> None:
    sequences = mixture()
    run(runner, sequences, token_budget=token_budget, max_num_seqs=16)
    assert_vectors(tiny[1].model, sequences, tiny[1].lm_head)


def test_prompts_beside_generation_equal_transformers_and_change_no_token(
    tiny: tuple[Path, Any], runner: TorchModelRunner
) -> None:
    sampling = Sampling(max_tokens=12, temperature=0.0)
    texts = [make_sequence(f"text-{seed}", random_prompt(9 + seed, seed), sampling) for seed in range(4)]
    alone = run(runner, texts).tokens
    sequences = mixture()
    again = [make_sequence(f"text-{seed}", random_prompt(9 + seed, seed), sampling) for seed in range(4)]
    beside = run(runner, [*again, *sequences], token_budget=31, max_num_seqs=16, arrivals_per_step=2).tokens
    assert {name: beside[name] for name in alone} == alone
    assert_vectors(tiny[1].model, sequences, tiny[1].lm_head)


def test_preempted_prompts_begin_their_sums_again(tiny: tuple[Path, Any], runner: TorchModelRunner) -> None:
    # Generating sequences take the blocks of prompts that are being summed; these start again from their first token.
    sampling = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    texts = [make_sequence(f"text-{seed}", random_prompt(20, seed), sampling) for seed in range(3)]
    sequences = [sequence_of(f"pooled-{seed}", random_prompt(140, seed), MEAN) for seed in range(2)]
    outcome = run(runner, [*texts, *sequences], token_budget=8, max_num_seqs=5, num_blocks=92, headroom_tokens=0)
    assert outcome.num_preemptions > 0
    assert any(sequence.num_preemptions for sequence in sequences)
    assert_vectors(tiny[1].model, sequences, tiny[1].lm_head)


def test_known_prefix_is_taken_where_only_the_last_vector_counts(
    tiny: tuple[Path, Any], runner: TorchModelRunner
) -> None:
    prompt = random_prompt(48, 3)
    sequences = [sequence_of("cold", prompt, LAST)]
    warm = [sequence_of(plan.rows, prompt, plan) for plan in (LAST, MEAN, FIRST)]
    run(runner, [*sequences, *warm], arrivals_per_step=1)
    assert [sequence.num_cached_tokens for sequence in warm] == [44, 0, 0]
    assert_vectors(tiny[1].model, [*sequences, *warm], tiny[1].lm_head)


def test_steps_on_padded_buffers_equal_transformers(tiny: tuple[Path, Any]) -> None:
    # The body of graphs, called as they are replayed on a GPU: each step overwrites the hidden vectors of the last.
    model = load(tiny[0], "cpu")
    device = make_device_runner(model, is_graphed=True, max_num_seqs=16, captured=CapturedSteps.ALL)
    sequences = mixture()
    run(device, sequences, token_budget=64, max_num_seqs=16)
    assert_vectors(tiny[1].model, sequences, tiny[1].lm_head)


def test_vector_that_is_no_number_fails_alone(tiny: tuple[Path, Any]) -> None:
    runner = make_runner(tiny[0])
    poison = 11
    runner.model.embedding[poison] = float("nan")
    prompts = [[poison, 5, 6], [5, 6, 7], [8, 9]]
    sequences = [sequence_of(str(number), prompt, MEAN) for number, prompt in enumerate(prompts)]
    outcome = run(runner, sequences)
    assert list(outcome.errors) == ["0"]
    assert [len(sequence.pooled) for sequence in sequences] == [0, 1, 1]


def test_mean_is_the_same_to_the_bit_however_prompts_are_divided_into_steps(runner: TorchModelRunner) -> None:
    answers = []
    for token_budget in (512, 64, 23, 7):
        sequences = [sequence_of(str(length), random_prompt(length, length), MEAN) for length in LENGTHS]
        run(runner, sequences, token_budget=token_budget, max_num_seqs=5)
        answers.append([answer(sequence).tobytes() for sequence in sequences])
    assert all(answer == answers[0] for answer in answers)
