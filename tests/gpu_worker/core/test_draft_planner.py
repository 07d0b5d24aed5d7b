from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import MAX_FORCED_TOKENS, DraftPlanner
from gpu_worker.core.step import ScheduledSequence
from tests.gpu_worker.core.parts import Parts


@dataclass
class Wanted:
    """A policy that wants the same depth of all, and notes the limits that it was told."""

    depth: int
    limits: list[int] = field(default_factory=list)

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        self.limits = limits
        return [self.depth] * len(sequences)


@dataclass
class Forcing:
    """A constraint that forces so many tokens."""

    count: int

    def forced_tokens(self) -> list[int]:
        return [1] * self.count


def planned(*sequences: Sequence) -> list[ScheduledSequence]:
    return [ScheduledSequence(sequence, sequence.num_computed_tokens, 1, True) for sequence in sequences]


def drafted(
    parts: Parts, policy: Wanted, items: list[ScheduledSequence], num_left: int, *, is_throttled: bool = False
) -> list[int]:
    planner = DraftPlanner(parts.blocks)
    planner.add_drafts(cast("Any", policy), items, len(items), num_left, is_throttled=is_throttled)
    return [item.num_draft_tokens for item in items]


def forced(parts: Parts, items: list[ScheduledSequence], num_left: int, *, is_throttled: bool = False) -> int:
    return DraftPlanner(parts.blocks).add_forced(items, len(items), num_left, is_throttled=is_throttled)


@pytest.fixture
def parts() -> Parts:
    return Parts(num_blocks=32, max_num_seqs=4, budget=64)


def test_forced_tokens_come_first_and_are_bounded(parts: Parts) -> None:
    sequences = [parts.run(4, max_tokens=40) for _ in range(4)]
    for sequence, count in zip(sequences, (MAX_FORCED_TOKENS + 5, 0, 2, 9), strict=True):
        sequence.constraint = cast("Any", Forcing(count))
        sequence.next_publish = 7
    sequences[1].constraint = None
    items = planned(*sequences)
    assert forced(parts, items, MAX_FORCED_TOKENS + 5) == MAX_FORCED_TOKENS + 5
    assert [(item.num_draft_tokens, len(item.forced)) for item in items] == [
        (MAX_FORCED_TOKENS, MAX_FORCED_TOKENS),
        (0, 0),
        (2, 2),
        (3, 3),
    ]
    # A landed share is looked at again, since it has more than one token.
    assert [sequence.next_publish for sequence in sequences] == [0, 7, 0, 0]
    # The others draft with what is left.
    assert drafted(parts, Wanted(2), items, 4) == [MAX_FORCED_TOKENS, 2, 2, 3]


def test_nothing_is_forced_where_nothing_is_left_or_wanted(parts: Parts) -> None:
    person, batch = parts.run(4, max_tokens=20), parts.run(4, max_tokens=20, lane="batch")
    person.constraint, batch.constraint = cast("Any", Forcing(0)), cast("Any", Forcing(3))
    items = planned(person, batch)
    assert forced(parts, items, 0) == 0
    assert forced(parts, items, 9, is_throttled=True) == 0
    assert [item.num_draft_tokens for item in items] == [0, 0]
    assert forced(parts, items, 9) == 3


def test_prompts_behind_the_decodes_are_left_alone(parts: Parts) -> None:
    decode, prompt = parts.run(4, max_tokens=20), parts.run(4, max_tokens=20)
    decode.constraint = prompt.constraint = cast("Any", Forcing(2))
    items = planned(decode, prompt)
    planner = DraftPlanner(parts.blocks)
    assert planner.add_forced(items, 1, 9, is_throttled=False) == 2
    planner.add_drafts(cast("Any", Wanted(2)), items, 1, 9, is_throttled=False)
    assert [item.num_draft_tokens for item in items] == [2, 0]
