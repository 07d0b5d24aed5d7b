from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from gpu_worker.core.landing import Landing
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step import LogprobEntry, SampledTokens, ScheduledStep, SequenceEvent, StepResult
from tests.gpu_worker.core.parts import Parts
from tests.gpu_worker.core.sequences import EOS


@dataclass
class Learner:
    """A policy that notes what it is told."""

    learned: list[tuple[int, tuple[int, ...]]]

    def learn(self, sequence: Sequence, num_drafted: int, accepted: tuple[int, ...]) -> None:
        self.learned.append((num_drafted, accepted))


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


def test_token_of_a_decode_is_one_event_with_its_place(landed: Landed) -> None:
    sequence = landed.parts.run(4, max_tokens=9)
    for number, token in enumerate((11, 12, 13)):
        entry = LogprobEntry(token, -0.5)
        (event,) = landed.land(landed.parts.decode(sequence), SampledTokens((token,), (entry,)))
        assert event == SequenceEvent(sequence, (token,), number, None, (entry,))
    assert sequence.token_ids[4:] == [11, 12, 13]


def test_full_blocks_are_findable_once_their_last_token_is_computed(landed: Landed) -> None:
    sequence = landed.parts.run(4, max_tokens=9)
    findable = []
    for token in range(11, 17):
        landed.land(landed.parts.decode(sequence), SampledTokens((token,)))
        findable.append(landed.parts.blocks.num_findable_tokens(sequence))
    assert findable == [4, 4, 4, 4, 8, 8]


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "finish"), [(1, (11,), "length"), (2, (11,), None), (2, (EOS,), "stop")]
)
def test_last_token_ends_its_sequence(
    landed: Landed, max_tokens: int, tokens: tuple[int, ...], finish: str | None
) -> None:
    sequence = landed.parts.run(4, max_tokens=max_tokens)
    (event,) = landed.land(landed.parts.decode(sequence), SampledTokens(tokens))
    assert (event.token_ids, event.finish) == (tokens, finish)
    assert (sequence.status is SequenceStatus.FINISHED) is (finish is not None)
    assert (sequence.block_table == []) is (finish is not None)


def test_token_for_a_sequence_that_has_ended_is_dropped(landed: Landed) -> None:
    sequence, other = landed.parts.run(4, max_tokens=9), landed.parts.run(4, max_tokens=9)
    plan = landed.parts.decode(sequence, other)
    landed.parts.live.finish(sequence)
    (event,) = landed.land(plan, SampledTokens((11,)), SampledTokens((12,)))
    assert event.sequence is other
    assert len(sequence.token_ids) == 4


def test_accepted_drafts_are_tokens_and_counted(landed: Landed) -> None:
    sequence = landed.parts.run(4, max_tokens=20)
    plan = landed.parts.decode(sequence, drafts=3)
    landed.parts.blocks.cover(sequence, 7)
    (event,) = landed.land(plan, SampledTokens((11, 12, 13), num_drafted=3, accepted=(0, 1)))
    assert (event.token_ids, event.num_tokens_before, event.finish) == ((11, 12, 13), 0, None)
    # The last of them is sampled and not computed yet.
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (6, 7)
    assert landed.learned == [(3, (0, 1))]
    assert (landed.speculation.num_drafts, landed.speculation.num_accepted_tokens) == (1, 2)
    assert list(landed.parts.live.running.decoding["interactive"].values()) == [sequence]
    assert len(sequence.block_table) == 2


def test_table_from_which_the_blocks_of_wrong_drafts_were_taken_is_told_again_from_there(landed: Landed) -> None:
    sequence = landed.parts.run(4, max_tokens=20)
    plan = landed.parts.decode(sequence, drafts=5)
    landed.parts.blocks.cover(sequence, 9)
    sequence.num_told_blocks = len(sequence.block_table)
    assert sequence.num_told_blocks == 3
    landed.land(plan, SampledTokens((11,), num_drafted=5))
    assert (sequence.num_told_blocks, len(sequence.block_table)) == (2, 2)


def test_drafts_behind_a_stop_are_not_taken(landed: Landed) -> None:
    sequence = landed.parts.run(4, max_tokens=20)
    plan = landed.parts.decode(sequence, drafts=3)
    landed.parts.blocks.cover(sequence, 7)
    entries = tuple(LogprobEntry(token, -0.5) for token in (11, EOS, 13))
    (event,) = landed.land(plan, SampledTokens((11, EOS, 13), entries, num_drafted=3, accepted=(0, 1)))
    assert (event.token_ids, event.logprobs, event.finish) == ((11, EOS), entries[:2], "stop")
    assert landed.learned == [(3, (0, 1))]
    assert sequence.status is SequenceStatus.FINISHED


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
    (event,) = landed.land(plan, SampledTokens((11, EOS), num_drafted=2, accepted=(0,), error="broken"))
    assert (event.token_ids, event.finish, event.error) == ((11, EOS), "stop", None)


def test_prompt_of_a_chunk_makes_no_event(landed: Landed) -> None:
    sequence = landed.parts.wait(10, max_tokens=9)
    landed.parts.start(sequence)
    plan = landed.parts.decode(sequence)
    item = plan.scheduled[0]
    chunk = ScheduledStep(plan.step, [type(item)(sequence, 0, 1, False)], 1)
    landed.parts.live.in_flight[0] = chunk
    sequence.last_chunk_step = chunk.step
    assert landed.land(chunk, SampledTokens()) == []
    assert sequence.token_ids[10:] == []
