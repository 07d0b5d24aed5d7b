"""Steps that fail, on real runners with every proposer: who is at fault fails alone, and the others answer as if alone.

A step may fail before, while and after the device computes it. Whatever it has left behind then (KV, drafts, counts of
penalties, the last token of a row) must not show in the answers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from gpu_worker.core.batch_sequences import BatchSequences
from gpu_worker.core.model_runner import PendingStep
from gpu_worker.core.plan import StepPlan
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
