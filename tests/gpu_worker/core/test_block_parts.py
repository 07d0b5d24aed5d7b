"""A pool of several parts: each sequence belongs to one, which has its prefix, or room; and random lives of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from gpu_worker.core.scheduler_config import SchedulerConfig, StateConfig, WindowConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.step import ScheduledStep
from tests.gpu_worker.core.harness import BLOCK, Harness, StepCost
from tests.gpu_worker.core.sequences import make_sequence
from tests.gpu_worker.core.test_scheduler_properties import POOL, SIZES, SchedulerMachine, drafts


def parted(num_blocks: int, *, num_parts: int = 2, **sizes: Any) -> Harness:
    return Harness(num_blocks=num_blocks, num_parts=num_parts, headroom_tokens=0, max_num_batched_tokens=64, **sizes)


def parts_of(*sequences: Sequence) -> list[int]:
    return [sequence.part for sequence in sequences]


def test_sequences_go_where_most_room_is() -> None:
    harness = parted(16)
    sequences = [make_sequence(length) for length in (9, 5, 5, 2)]
    harness.add(*sequences)
    harness.step()
    # Three blocks, then two and two, then one beside three.
    assert parts_of(*sequences) == [0, 1, 1, 0]
    harness.run_to_reference(*sequences)


def test_sequence_goes_to_its_prefix_unless_another_part_has_that_much_more_room() -> None:
    harness = parted(16, max_num_seqs=8)
    prompt = list(range(100, 117))
    first, other = make_sequence(prompt, max_tokens=1), make_sequence(13, max_tokens=1)
    harness.add(first, other)
    harness.run()
    assert parts_of(first, other) == [0, 1]
    # Four blocks are known in part 0. Behind the first, part 1 has five more spare blocks; then it has its own copy.
    same = [make_sequence([*prompt[:16], 7, number], max_tokens=20) for number in range(5)]
    harness.add(*same)
    harness.step()
    assert parts_of(*same) == [0, 1, 0, 0, 0]
    assert [sequence.num_cached_tokens for sequence in same] == [16, 0, 16, 16, 16]
    harness.run_to_reference(*same)


def test_only_sequences_of_the_part_without_room_are_preempted() -> None:
    harness = parted(8)
    lengths, outputs = (7, 7, 5, 3), (8, 2, 8, 4)
    first, other, behind, latest = [make_sequence(n, max_tokens=m) for n, m in zip(lengths, outputs, strict=True)]
    harness.add(first, other, behind, latest)
    harness.step()
    assert parts_of(first, other, behind, latest) == [0, 1, 0, 1]
    # The first two of part 0 have filled it when the first one needs a third block.
    harness.run_to_reference(first, other, behind, latest)
    assert [each.num_preemptions > 0 for each in (first, other, behind, latest)] == [False, False, True, False]


def test_batch_sequences_give_way_in_one_part_alone() -> None:
    harness = parted(8, max_num_seqs=4)
    batch = [make_sequence(9, max_tokens=8, lane="batch", arrival=number) for number in range(2)]
    harness.add(*batch)
    harness.step()
    assert parts_of(*batch) == [0, 1]
    person = make_sequence(9, max_tokens=2)
    harness.add(person)
    harness.step()
    assert sum(sequence.num_preemptions for sequence in batch) == 1
    assert person.status is SequenceStatus.RUNNING
    harness.run_to_reference(person, *batch)


def test_no_sequence_is_longer_than_a_part() -> None:
    config = parted(16).scheduler.config
    assert config.max_num_tokens == 8 * BLOCK


@pytest.mark.parametrize("other", [{"num_blocks": 9}, {"windows": (WindowConfig(5, 9),)}, {"state": StateConfig(9, 1)}])
def test_parts_of_other_things_are_refused(other: dict[str, Any]) -> None:
    sizes = {"block_size": 4, "num_blocks": 8, "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}
    with pytest.raises(ValueError, match="equal parts"):
        SchedulerConfig(**{**sizes, **other}, num_parts=2)


class PartMachine(SchedulerMachine):
    @initialize(
        sizes=st.fixed_dictionaries(
            {
                **SIZES,
                "num_parts": st.sampled_from([2, 3]),
                "enable_prefix_caching": st.sampled_from([True, True, False]),
                "policy": drafts(None, None, 0.5, 0.9),
                "cost": st.sampled_from([None, StepCost(1.0, 0.3, 0.1)]),
            }
        )
    )
    def start(self, sizes: dict[str, Any]) -> None:
        self._start(**sizes)

    def _check_lanes(self, plan: ScheduledStep) -> None:
        """While batch sequences run, an interactive one waits only if it lacks blocks without them, in every part."""
        people = self._with(SequenceStatus.WAITING, SequenceStatus.PREEMPTED, lane="interactive")
        running = self._with(SequenceStatus.RUNNING)
        given = {item.sequence: item.num_tokens - item.samples for item in plan.scheduled}
        wanted = sum(s.num_uncomputed_tokens + given.get(s, 0) for s in running if s.lane == "interactive")
        people = [sequence for sequence in people if sequence not in plan.departed]
        is_full = wanted >= self.scheduler.config.max_num_batched_tokens
        if not people or is_full or not any(sequence.lane == "batch" for sequence in running):
            return
        first: dict[str, Sequence] = {}
        for person in sorted(people, key=lambda s: s.order):
            first.setdefault(person.tenant, person)
        config = self.scheduler.config
        needed = max(-(-min(s.num_tokens + config.headroom_tokens, s.max_num_tokens) // BLOCK) for s in first.values())
        in_flight = [item.sequence for plan, _ in self.harness.in_flight for item in plan.scheduled]
        holders = {s for s in running if s.lane == "interactive"}
        holders |= {s for s in in_flight if s.status is SequenceStatus.FINISHED}
        for part in range(config.num_parts):
            own = [sequence for sequence in holders if sequence.part == part]
            promised = sum(max(s.expected_blocks - len(s.block_table), 0) for s in own)
            assert needed > POOL // config.num_parts - len({block for s in own for block in s.block_table}) - promised


class TestPartMachine(PartMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=30)


@pytest.mark.slow
class TestPartMachineAtLength(PartMachine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=40)
