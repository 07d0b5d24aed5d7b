"""Steps with prompt tokens run through graphs as decodes do: the same code on padded steps, shown without a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence, StepResult
from gpu_worker.execution.batch.graph_shapes import CapturedSteps
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.decoder import CausalLM
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import TOKEN_BUDGET, load, make_device_runner
from tests.gpu_worker.execution.engine_run import BLOCK, make_sequence, random_prompt, run
from tests.gpu_worker.models.families.latent_cases import CASES
from tests.gpu_worker.models.families.random_models import save_case

NUM_SEQS = 40
# Chunks of prompts at their beginnings and behind, and decodes, as (tokens before, tokens of the step).
MIXTURES = [
    [(0, 1)],
    [(0, 64)],
    [(0, 63), (30, 1)],
    [(5, 7), (0, 20), (33, 1), (60, 1), (0, 30)],
    [(0, 2)] * 20 + [(9, 1)] * 20,
    [(3, 40), *[(position, 1) for position in range(20)]],
]


@pytest.fixture(scope="module")
def model(directory: Path) -> CausalLM:
    return load(directory, "cpu")


def prompts(lengths: list[int]) -> list[Sequence]:
    sampling = Sampling(temperature=0.0, logprobs=3, prompt_logprobs=2)
    return [make_sequence(str(index), random_prompt(length, index), sampling) for index, length in enumerate(lengths)]


def compute(runner: TorchModelRunner, mixture: list[tuple[int, int]]) -> tuple[StepResult, list[torch.Tensor]]:
    """Compute what is before, a sequence a step, and then the mixture; return that and what the cache holds."""
    writer, blocks = PlanWriter(), itertools.count()
    sequences = prompts([before + length for before, length in mixture])
    for sequence, (before, _) in zip(sequences, mixture, strict=True):
        sequence.block_table = [next(blocks) for _ in range(-(-len(sequence.token_ids) // BLOCK))]
        if before:
            runner.submit(writer.write_any([ScheduledSequence(sequence, 0, before, False)])).result()
    scheduled = [
        ScheduledSequence(sequence, before, length, index % 3 != 1)
        for index, (sequence, (before, length)) in enumerate(zip(sequences, mixture, strict=True))
    ]
    result = runner.submit(writer.write_any(scheduled, step=1)).result()
    return result, [tensor for layer in runner.cache.layers for tensor in layer.tensors]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_padded_step_gives_what_the_eager_one_gives_and_writes_nothing_else(
    model: CausalLM, mixture: list[tuple[int, int]]
) -> None:
    expected, expected_cache = compute(make_device_runner(model, is_graphed=False), mixture)

    result, cache = compute(make_device_runner(model, is_graphed=True), mixture)

    assert result == expected
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)
    assert all(tensor.isnan().any() for tensor in cache), "blocks that no sequence has are unchanged"


@pytest.mark.parametrize("token_budget", [1, 9, TOKEN_BUDGET])
def test_every_step_within_the_shapes_is_replayed(
    model: CausalLM, token_budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_device_runner(model, is_graphed=True)
    monkeypatch.setattr(runner, "_launch", lambda *_: pytest.fail("launched one kernel after the other"))
    sequences = prompts([1, 5, 40, 100, 17])
    outcome = run(runner, sequences, token_budget=token_budget)
    assert [len(outcome.tokens[sequence.id]) for sequence in sequences] == [16] * 5


LARGE_BUDGET = 1100


@pytest.fixture(scope="module", params=["deepseek-v2-lite", "deepseek-v3"])
def many_launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """A model with experts and latent attention."""
    directory = tmp_path_factory.mktemp(request.param)
    save_case(CASES[request.param], directory)
    return load(directory, "cpu")


@pytest.mark.parametrize("lengths", [[75] * 7, [100] * 10, [127] * 6 + [1] * 30], ids=str)
def test_large_steps_of_many_launches_are_replayed_and_change_nothing(
    many_launches: CausalLM, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models whose layers are many small kernels: up to 2,048 tokens, in a bounded number of graphs."""

    def make(*, is_graphed: bool) -> TorchModelRunner:
        sizes = {"num_blocks": 600, "max_model_len": 128, "token_budget": LARGE_BUDGET}
        runner = make_device_runner(many_launches, is_graphed=is_graphed, **sizes)
        if is_graphed:
            monkeypatch.setattr(runner, "_launch", lambda *_: pytest.fail("launched one kernel after the other"))
        return runner

    expected, expected_cache = compute(make(is_graphed=False), [(0, length) for length in lengths])
    result, cache = compute(make(is_graphed=True), [(0, length) for length in lengths])
    assert result == expected
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("captured", CapturedSteps)
def test_only_kinds_of_steps_that_were_asked_for_are_captured(model: CausalLM, captured: CapturedSteps) -> None:
    runner = make_device_runner(model, is_graphed=False, num_blocks=100, captured=captured)
    counts: list[tuple[int, int]] = []
    runner.capture_graphs(lambda *count: counts.append(count))
    # Three shapes of mixtures: 64 tokens of at most 4, 16 and 40 sequences.
    num_decodes = 8
    assert len(counts) == {"off": 0, "decode": num_decodes, "all": num_decodes + 3}[captured.value]
    outcome = run(runner, prompts([3, 30]))
    assert len(outcome.tokens["1"]) == 16
