"""Steps that fail, on real runners with every proposer: who is at fault fails alone, and the others answer as if alone.

A step may fail before, while and after the device computes it. Whatever it has left behind then (KV, drafts, counts of
penalties, the last token of a row) must not show in the answers.

A row whose logits are not a distribution, with every proposer and all samplings beside it: it fails alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch

from gpu_worker.core.batch_sequences import BatchSequences
from gpu_worker.core.model_runner import InvalidLogitsError, PendingStep
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import StepResult
from tests.gpu_worker.matrix.checks import check_answer, check_nothing_is_left
from tests.gpu_worker.matrix.factors import ENGINE_FACTORS, PLAIN, SAMPLINGS, Ask, EngineCell, is_in_default_run
from tests.gpu_worker.matrix.parts import Runner, make_parts
from tests.gpu_worker.matrix.traffic import Choice, Oracle, Traffic

POISON = Choice(Ask("temperature", "1", "none", "nothing", "fresh"), 70)
PRIMER = Choice(Ask("greedy", "1", "hit", "nothing", "fresh"), 71)
LAST = Choice(Ask("greedy", "1", "none", "nothing", "fresh"), 72)
OTHERS = [Choice(Ask(name, "1", "none", "logprobs", "fresh"), 73) for name in SAMPLINGS]
OTHERS += [Choice(Ask(name, "1", "hit", "nothing", "fresh"), 74) for name in SAMPLINGS]

# The steps between failures are enough to compute the failed one again in groups, so that no innocent fails twice.
DISTANCE = 14


class FailedStepError(Exception):
    """What the runner below raises."""


class LostStep:
    """A step that was computed, and whose result is lost."""

    def __init__(self, step: PendingStep) -> None:
        self._step = step

    def result(self) -> StepResult:
        self._step.result()
        raise FailedStepError


class FailingRunner:
    """A runner of which a step fails now and then, and every one that computes a certain sequence.

    By turns they fail while they are submitted, after that, and when their result is asked for.
    """

    def __init__(self, runner: Runner, poisoned: str) -> None:
        self._runner = runner
        self._poisoned = poisoned
        self._sequences = BatchSequences()
        self._failed_at = 0
        self.num_failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, plan: StepPlan) -> PendingStep:
        self._sequences.apply(plan)
        is_poisoned = any(sequence.id == self._poisoned for sequence in self._sequences.of(plan.rows))
        if not is_poisoned and plan.step < self._failed_at + DISTANCE:
            return self._runner.submit(plan)
        self._failed_at = plan.step
        self.num_failed += 1
        way = self.num_failed % 3
        if way == 0:
            return LostStep(self._runner.submit(plan))
        if way == 1:
            self._submit_brokenly(plan)
        else:
            self._runner.submit(plan)
        raise FailedStepError

    def _submit_brokenly(self, plan: StepPlan) -> None:
        """Fail in the midst of a submission; the graph of a decode is launched all the same."""

        def fail(*_: Any) -> NoReturn:
            raise FailedStepError

        model = self._runner.model
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "forward", fail)
            self._runner.submit(plan)


def cells() -> Iterator[Any]:
    """Every proposer on two runners with one budget by turns; on the third and with the other too in the slow run."""
    proposers, runners = [PLAIN, *ENGINE_FACTORS["proposer"]], ENGINE_FACTORS["runner"]
    for (first, proposer), (second, runner) in itertools.product(enumerate(proposers), enumerate(runners)):
        for number, budget in enumerate(ENGINE_FACTORS["budget"]):
            is_fast = number == (first // 2 + second) % 2 and is_in_default_run(proposer, runner)
            yield pytest.param(proposer, runner, budget, marks=[] if is_fast else pytest.mark.slow)


def check_failing_steps(oracle: Oracle, cell: EngineCell) -> None:
    everybody = [PRIMER, *OTHERS, POISON, LAST]
    parts = make_parts(oracle.models, cell, {choice.name: oracle.script(choice, cell) for choice in everybody})
    failing = FailingRunner(parts.runner, POISON.name)
    traffic = Traffic(dataclasses.replace(parts, runner=failing), (FailedStepError,))  # type: ignore[arg-type]
    traffic.run([PRIMER.sequence()])
    coming = [choice.sequence() for choice in (*OTHERS, POISON)]
    traffic.run(coming, arrivals_per_step=3, between_steps=lambda _: parts.scheduler.check_integrity())
    assert traffic.answers[POISON.name].finishes == ["failed"]
    for choice in OTHERS:
        check_answer(choice, cell, traffic, oracle.answer(choice, cell))
    assert failing.num_failed > 5
    traffic.run([LAST.sequence()])
    traffic.parts = parts
    check_nothing_is_left(traffic, LAST.name)


@pytest.mark.parametrize(("proposer", "runner", "budget"), list(cells()))
def test_neighbours_of_failing_steps_answer_as_if_alone(
    oracle: Oracle, proposer: str, runner: str, budget: str
) -> None:
    check_failing_steps(oracle, EngineCell(proposer, runner, "auto", "ample", budget, "fixed"))


BAD = Choice(Ask("everything", "1", "none", "logprobs", "fresh"), 80)
INVALID_PRIMER = Choice(Ask("greedy", "1", "hit", "nothing", "fresh"), 81)
INVALID_LAST = Choice(Ask("greedy", "1", "none", "nothing", "fresh"), 82)
INVALID_OTHERS = [Choice(Ask(name, "1", "none", "logprobs", "fresh"), 83) for name in SAMPLINGS]
NUM_VALID = 3
INVALID = {"host": math.nan, "device": -math.inf, "graphed": math.nan}


def break_row(runner: Runner, bad: Sequence, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all logits of a sequence be `value`, once its output has `NUM_VALID` tokens."""
    sample = runner._sampler.sample

    def sample_with_bad_row(logits: torch.Tensor, staged: Any) -> Any:
        if bad.row is not None:
            logits[(staged.slots.tensor == bad.row) & (staged.draw.positions.tensor >= NUM_VALID)] = value
        return sample(logits, staged)

    monkeypatch.setattr(runner._sampler, "sample", sample_with_bad_row)


@pytest.mark.parametrize(
    ("proposer", "runner"),
    [
        pytest.param(*levels, marks=[] if is_in_default_run(*levels) else pytest.mark.slow)
        for levels in itertools.product([PLAIN, *ENGINE_FACTORS["proposer"]], ENGINE_FACTORS["runner"])
    ],
)
def test_neighbours_of_an_invalid_row_answer_as_if_alone(
    oracle: Oracle, proposer: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = EngineCell(proposer, runner, "auto", "ample", "large", "fixed")
    everybody = [INVALID_PRIMER, *INVALID_OTHERS, BAD, INVALID_LAST]
    parts = make_parts(oracle.models, cell, {choice.name: oracle.script(choice, cell) for choice in everybody})
    traffic, bad, whole = Traffic(parts), BAD.sequence(), oracle.answer(BAD, cell)
    traffic.run([INVALID_PRIMER.sequence()])
    with monkeypatch.context() as patch:
        break_row(parts.runner, bad, INVALID[runner], patch)
        coming = [
            *(choice.sequence() for choice in INVALID_OTHERS[:7]),
            bad,
            *(choice.sequence() for choice in INVALID_OTHERS[7:]),
        ]
        traffic.run(coming, between_steps=lambda _: parts.scheduler.check_integrity())
    answer = traffic.answers[BAD.name]
    assert answer.finishes == ["failed"]
    assert answer.token_ids == whole.token_ids[:NUM_VALID]
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    for choice in INVALID_OTHERS:
        check_answer(choice, cell, traffic, oracle.answer(choice, cell))
    assert traffic.engine.stats.num_failed_steps == 0
    traffic.run([INVALID_LAST.sequence()])
    check_nothing_is_left(traffic, INVALID_LAST.name)


@pytest.mark.parametrize("runner", ENGINE_FACTORS["runner"])
def test_invalid_row_without_neighbours_fails_when_it_is_computed_alone(
    oracle: Oracle, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = EngineCell(PLAIN, runner, "auto", "ample", "large", "fixed")
    parts = make_parts(oracle.models, cell, {})
    traffic, bad = Traffic(parts, (InvalidLogitsError,)), BAD.sequence()
    break_row(parts.runner, bad, math.nan, monkeypatch)
    traffic.run([bad])
    assert traffic.answers[BAD.name].finishes == ["failed"]
    assert traffic.answers[BAD.name].token_ids == oracle.answer(BAD, cell).token_ids[:NUM_VALID]
    assert not traffic.engine.stats.is_fatal
    traffic.run([INVALID_LAST.sequence()])
    check_answer(INVALID_LAST, cell, traffic, oracle.answer(INVALID_LAST, cell))
