from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from gpu_worker.core.landing import Landing
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step import SampledTokens, ScheduledStep, SequenceEvent, StepResult
from tests.gpu_worker.core.parts import Parts
from tests.gpu_worker.core.sequences import EOS


@dataclass
class Learner:
    """A policy that notes what it is told."""

    learned: list[tuple[int, tuple[int, ...]]]

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.learned.append((num_drafted, num_accepted))


class Landed:
    """Sequences whose steps land as the test says."""

    def __init__(self) -> None:
        self.parts = Parts(num_blocks=32, max_num_seqs=4, budget=64)
        self.learned: list[tuple[int, tuple[int, ...]]] = []
        self.speculation = Speculation(cast("Any", Learner(self.learned)))
        self.landing = Landing(self.parts.blocks, self.parts.live, self.speculation)

    def land(self, plan: ScheduledStep, *sampled: SampledTokens) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        self.landing.apply(plan, StepResult(plan.step, list(sampled)), events)
        self.parts.live.land(plan)
        self.parts.live.check_integrity()
        return events


@pytest.fixture
def landed() -> Landed:
    return Landed()


def test_error_ends_a_sequence_behind_the_tokens_that_it_got(landed: Landed) -> None:
    sequence, other = landed.parts.run(4, max_tokens=9), landed.parts.run(4, max_tokens=9)
    plan = landed.parts.decode(sequence, other)
    failed, going_on = landed.land(plan, SampledTokens(error="broken"), SampledTokens((12,)))
    assert (failed.token_ids, failed.finish, failed.error) == ((), "failed", "broken")
    assert sequence.status is SequenceStatus.FINISHED
    assert (going_on.token_ids, going_on.finish) == ((12,), None)


def test_tokens_that_end_a_sequence_before_an_error_count_and_the_error_does_not(landed: Landed) -> None:
    sequence = landed.parts.run(4, max_tokens=9)
    plan = landed.parts.decode(sequence, drafts=2)
    landed.parts.blocks.cover(sequence, 6)
    (event,) = landed.land(plan, SampledTokens((11, EOS), num_drafted=2, num_accepted=1, error="broken"))
    assert (event.token_ids, event.finish, event.error) == ((11, EOS), "stop", None)
