"""Random lives of a small scheduler, checked after every step against what a contiguous model generates.

With one step in flight or several, with drafts of any quality and depth: that model knows neither, so the tokens are
the same.
"""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.step import ScheduledSequence, ScheduledStep
from shared.cache_hints import CacheHints
from shared.messages import Lane
from tests.gpu_worker.core.harness import BLOCK, Harness, StepCost
from tests.gpu_worker.core.paged_oracle import reference_tokens
from tests.gpu_worker.core.sequences import EOS, make_sequence
from tests.gpu_worker.core.service_oracle import ServiceOracle, bound

# Whatever they say, tokens are the same, and no block is lost.
hints = st.none() | st.builds(
    CacheHints,
    session_id=st.sampled_from([None, "s", "t"]),
    retain_s=st.sampled_from([0.0, 3.0, 1000.0]),
    supersedes=st.booleans(),
    drop=st.booleans(),
)
VOCAB_SIZE = 23
POOL = 12

lanes = st.sampled_from(["interactive", "batch"])
# Few distinct beginnings, so that sequences share prefixes; some far too long for the pool together.
prompts = st.builds(
    lambda beginning, length, tail: [*[beginning] * length, *tail],
    st.sampled_from([3, 4]),
    st.integers(1, 30),
    st.lists(st.integers(1, 6), max_size=4),
)


class RandomDrafts:
    """Any depth for anybody at any time, or none for some steps; each draft is right with a set probability."""

    def __init__(self, seed: int, share_right: float) -> None:
        self._random = random.Random(seed)
        self._share_right = share_right
        self.num_accepted = 0
        self._num_backing_off = 0

    @property
    def is_backing_off(self) -> bool:
        return self._num_backing_off > 0

    def may_draft(self, num_sequences: int, *, is_changing: bool) -> bool:
        if self._random.random() < 0.1:
            self._num_backing_off = 0
        if self._num_backing_off:
            self._num_backing_off -= 1
            return False
        return True

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        assert len(sequences) == len(limits)
        if self._random.random() < 0.3:
            self._num_backing_off = self._random.randint(0, 6)
            return [0] * len(sequences)
        return [self._random.randint(0, 12) for _ in sequences]

    def draft(self, right: list[int]) -> list[int]:
        drafts = [t if self._random.random() < self._share_right else self._random.randrange(50) for t in right]
        return drafts[: self._random.randint(0, len(drafts))]

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted
        self.num_accepted += num_accepted

    def time(self, num_sequences: int, num_drafted: int, duration_s: float) -> None:
        raise AssertionError


def drafts(*shares_right: float | None) -> st.SearchStrategy[RandomDrafts | None]:
    shares = st.sampled_from(shares_right)
    return st.builds(
        lambda share, seed: None if share is None else RandomDrafts(seed, share), shares, st.integers(0, 1000)
    )


SIZES: dict[str, st.SearchStrategy[Any]] = {
    "max_num_seqs": st.integers(1, 5),
    "slack": st.integers(0, 12),
    "headroom_tokens": st.sampled_from([0, 4, 128]),
    "max_steps_in_flight": st.sampled_from([1, 2, 2, 3]),
}


class SchedulerMachine(RuleBasedStateMachine):
    # Most tokens of one input, and of all that run together.
    max_input = max_running = POOL * BLOCK

    @initialize(
        sizes=st.fixed_dictionaries(
            {
                **SIZES,
                "enable_prefix_caching": st.booleans(),
                "max_model_len": st.sampled_from([40, 1000]),
                "policy": drafts(None, None, 0.0, 0.5, 0.9, 1.0),
                "cost": st.sampled_from([None, StepCost(1.0, 0.3, 0.1), StepCost(1.0, 0.01, 0.001)]),
            }
        )
    )
    def start(self, sizes: dict[str, Any]) -> None:
        self._start(**sizes)

    def _start(
        self,
        max_num_seqs: int,
        slack: int,
        policy: RandomDrafts | None = None,
        interval: int | None = None,
        slot_slack: int = 0,
        **sizes: Any,
    ) -> None:
        self.harness = Harness(
            num_blocks=POOL,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + slack,
            vocab_size=VOCAB_SIZE,
            policy=policy,
            drafter=None if policy is None else policy.draft,
            state=None if interval is None else StateConfig(max_num_seqs + slot_slack, interval),
            **sizes,
        )
        self.scheduler = self.harness.scheduler
        self.sequences: list[Sequence] = []
        self.aborted: set[str] = set()
        self.failed: set[str] = set()
        self.rolled_back: set[Sequence] = set()
        self.service = ServiceOracle(lambda sequence: sequence.tenant)

    @rule(
        prompt=prompts,
        lifetime=st.none() | st.integers(1, 30),
        request=st.fixed_dictionaries(
            {
                "lane": lanes,
                "priority": st.integers(-1, 1),
                "max_tokens": st.integers(0, 40),
                "tenant": st.sampled_from(["a", "a", "b", "c"]),
                "salt": st.sampled_from([b"a", b"b"]),
                "ignore_eos": st.booleans(),
                "hints": hints,
                "prompt_logprobs": st.sampled_from([None, None, 0]),
            }
        ),
    )
    def add(self, prompt: list[int], lifetime: int | None, request: dict[str, Any]) -> None:
        deadline = None if lifetime is None else self.harness.now + lifetime
        self._add(make_sequence(prompt, deadline=deadline, **request))

    @rule(prompt=prompts, lane=lanes, num_emitted=st.integers(1, 12), max_tokens=st.integers(1, 20))
    def add_resumed(self, prompt: list[int], lane: Lane, num_emitted: int, max_tokens: int) -> None:
        self._add(self._resumed(prompt, lane, num_emitted, max_tokens))

    @rule(
        prompt=prompts,
        num_emitted=st.integers(0, 12),
        max_tokens=st.integers(1, 20),
        num_trial_tokens=st.sampled_from([1, 5]),
    )
    def add_tried(self, prompt: list[int], num_emitted: int, max_tokens: int, num_trial_tokens: int) -> None:
        sequence = self._resumed(prompt, "batch", num_emitted, max_tokens)
        sequence.trial_end = len(sequence.token_ids) + num_trial_tokens
        self._add(sequence)

    @staticmethod
    def _resumed(prompt: list[int], lane: Lane, num_emitted: int, max_tokens: int) -> Sequence:
        emitted, _ = reference_tokens(b"a", prompt, min(num_emitted, max_tokens), frozenset([EOS]), VOCAB_SIZE)
        return make_sequence(prompt, emitted=emitted, lane=lane, max_tokens=max_tokens, salt=b"a")

    def _add(self, sequence: Sequence) -> None:
        if sequence.num_tokens < self.scheduler.config.max_num_tokens:
            self.sequences.append(sequence)
            self.harness.add(sequence)
            self.scheduler.check_integrity()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._abort(data.draw(st.sampled_from(self.sequences)))
        self.scheduler.check_integrity()

    def _abort(self, sequence: Sequence) -> None:
        was_finished = sequence.status is SequenceStatus.FINISHED
        assert self.scheduler.abort(sequence.id) is (None if was_finished else sequence)
        if not was_finished:
            self.aborted.add(sequence.id)

    @rule(repeat=st.integers(1, 6))
    def step(self, repeat: int) -> None:
        for _ in range(repeat):
            self._fill()
            self.harness.land()
            self._check_after_step()

    @precondition(lambda self: self.harness.can_submit())
    @rule()
    def submit(self) -> None:
        self._submitted()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def land(self) -> None:
        self.harness.land()
        self._check_after_step()

    @rule(data=st.data())
    def abort_in_flight(self, data: st.DataObject) -> None:
        self._fill()
        in_flight = [item.sequence for plan, _ in self.harness.in_flight for item in plan.scheduled]
        if in_flight:
            self._abort(data.draw(st.sampled_from(in_flight)))
            self.scheduler.check_integrity()

    @rule(num_groups=st.integers(1, 3), num_failing=st.integers(0, 3))
    def failing_step(self, num_groups: int, num_failing: int) -> None:
        """A step fails; some of its sequences are at fault, the others are computed again in groups."""
        items = self._lose()
        for item in items[:num_failing]:
            self.failed.add(item.sequence.id)
            self.harness.fail(item.sequence)
        for group in (items[first::num_groups] for first in range(num_groups)):
            if self.harness.schedule_again(group) is not None:
                self.scheduler.check_integrity()
                self.harness.land()
                self._check_after_step()

    @rule()
    def failing_step_that_nobody_computes_again(self) -> None:
        """What was undone may also be planned with all the rest."""
        self._lose()
        self._check_after_step()

    def _lose(self) -> list[ScheduledSequence]:
        self._fill()
        self.rolled_back |= {item.sequence for plan, _ in self.harness.in_flight for item in plan.scheduled}
        items = self.harness.lose()
        self.scheduler.check_integrity()
        return items

    def _fill(self) -> None:
        while self.harness.can_submit() and self._submitted():
            pass
        assert self.harness.in_flight

    def _submitted(self) -> bool:
        """Submit a step, and return whether there may be another one behind it."""
        self.harness.now += 1.0
        waiting = [s for s in self.sequences if s.status is SequenceStatus.WAITING]
        is_idle = not self.harness.in_flight
        self.service.waits(self._waiting_people())
        num_preemptions = self.scheduler.stats.num_preemptions
        plan = self.harness.try_schedule()
        self.scheduler.check_integrity()
        self._check_order(waiting)
        assert is_idle or self.scheduler.stats.num_preemptions == num_preemptions, "preempted under a step in flight"
        if plan is None:
            assert not is_idle, "nothing is in flight that could land first"
            return False
        self._check_service(plan)
        self._check_budget(plan)
        is_restoring, config = self.scheduler._live.num_restoring, self.scheduler.config
        if not (config.windows or config.state or is_restoring):
            # Blocks of windows and slots are counted by group, and blocks that are loaded into are held beside.
            self._check_people_first(plan)
            self._check_lanes(plan)
        has_work = self._with(SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.PREEMPTED) or not is_idle
        if has_work and not is_restoring:
            assert plan.scheduled, "there is work, and nothing is scheduled"
        return bool(plan.scheduled)

    def _check_service(self, plan: ScheduledStep) -> None:
        """Tenants that wait all the time are served alike, where none has a priority."""
        self.service.serves(plan)
        people = self._waiting_people()
        self.service.waits([] if any(sequence.priority for sequence in people) else people)
        # No batch sequence takes anything from people, and none has more input than the pool holds.
        assert self.service.largest <= bound(self.max_input, self.max_running)

    def _waiting_people(self) -> list[Sequence]:
        return self._with(SequenceStatus.WAITING, SequenceStatus.PREEMPTED, lane="interactive")

    def _check_budget(self, plan: ScheduledStep) -> None:
        names = [item.sequence.id for item in plan.scheduled]
        assert len(set(names)) == len(names) <= self.scheduler.config.max_num_seqs
        assert plan.num_tokens == sum(item.num_tokens for item in plan.scheduled)
        assert all(item.num_tokens == 1 and item.samples for item in plan.scheduled[: plan.num_decodes])
        # A chunk may be one token of a prompt, or of what an earlier attempt has emitted when no more budget is left.
        assert all(
            item.start < item.sequence.num_prompt_tokens or item.num_tokens > 1 or not item.samples
            for item in plan.scheduled[plan.num_decodes :]
        )
        assert not any(item.num_draft_tokens for item in plan.scheduled[plan.num_decodes :])
        num_drafts = sum(item.num_draft_tokens for item in plan.scheduled)
        assert plan.num_tokens + num_drafts <= self.scheduler.config.max_num_batched_tokens
        assert all(item.num_tokens >= 1 for item in plan.scheduled)
        # A preempted sequence may start again at once, in blocks that it shares with one that runs on.
        scheduled = {item.sequence for item in plan.scheduled}
        again = scheduled & set(plan.departed) - self.rolled_back
        assert all(sequence.num_preemptions for sequence in again)
        for sequence in self._with(SequenceStatus.RUNNING, lane="interactive"):
            # Only a sequence with more than one token to compute may have to wait for the budget, or one that lands.
            assert sequence.id in names or sequence.num_uncomputed_tokens > 1 or not sequence.wants_token

    def _check_people_first(self, plan: ScheduledStep) -> None:
        """Batch work gets no token of a step that has too few for people; what is paused keeps its blocks."""
        given = {item.sequence for item in plan.scheduled}
        people = self._with(SequenceStatus.RUNNING, lane="interactive")
        # A budget bounds how many tokens of a prompt a step can take, whatever else it computes.
        if any(s.num_computed_tokens < len(s.token_ids) for s in people if s.budget is None):
            assert all(sequence.lane == "interactive" for sequence in given)
        is_full = plan.num_tokens == self.scheduler.config.max_num_batched_tokens
        for sequence in self._with(SequenceStatus.RUNNING, lane="batch"):
            assert sequence.block_table
            is_decoding = sequence.num_uncomputed_tokens == 1 and sequence.wants_token
            assert sequence in given or not is_decoding or is_full or plan.is_throttled or self.harness.cost is not None

    def _check_order(self, waiting_before: list[Sequence]) -> None:
        for lane in ("interactive", "batch"):
            started = [s for s in waiting_before if s.lane == lane and s.status is SequenceStatus.RUNNING]
            passed_by = [s for s in waiting_before if s.lane == lane and s.status is SequenceStatus.WAITING]
            # Tenants take turns.
            for one in started:
                for other in passed_by:
                    assert bool(one.trial_end) >= bool(other.trial_end)
                    if one.tenant == other.tenant and bool(one.trial_end) == bool(other.trial_end):
                        assert one.order < other.order
                        assert one.priority > other.priority or one.arrival < other.arrival

    def _check_lanes(self, plan: ScheduledStep) -> None:
        """While batch sequences run, an interactive one waits only for more blocks than all of them hold."""
        people = self._with(SequenceStatus.WAITING, SequenceStatus.PREEMPTED, lane="interactive")
        people = [sequence for sequence in people if sequence not in plan.departed]
        running = self._with(SequenceStatus.RUNNING)
        background = [sequence for sequence in running if sequence.lane == "batch"]
        given = {item.sequence: item.num_tokens - item.samples for item in plan.scheduled}
        wanting = [s for s in running if s in given or s.wants_token or not s.num_pending_tokens]
        wanted = sum(s.num_uncomputed_tokens + given.get(s, 0) for s in wanting if s.lane == "interactive")
        if not people or not background or wanted >= self.scheduler.config.max_num_batched_tokens:
            return
        # The first of each tenant; it is the turn of one of them.
        first: dict[str, Sequence] = {}
        for person in sorted(people, key=lambda s: s.order):
            first.setdefault(person.tenant, person)
        headroom = self.scheduler.config.headroom_tokens
        needed = max(-(-min(s.num_tokens + headroom, s.max_num_tokens) // BLOCK) for s in first.values())
        holders = {s for s in running if s.lane == "interactive"}
        in_flight = [item.sequence for plan, _ in self.harness.in_flight for item in plan.scheduled]
        holders |= {s for s in in_flight if s.status is SequenceStatus.FINISHED}
        promised = sum(max(s.expected_blocks - len(s.block_table), 0) for s in holders)
        held = {block for s in holders for block in s.block_table}
        assert needed > POOL - len(held) - promised

    def _check_after_step(self) -> None:
        self.scheduler.check_integrity()
        for sequence in self.sequences:
            is_over = sequence.id in self.harness.finish or sequence.id in self.aborted
            assert (sequence.status is SequenceStatus.FINISHED) == is_over

    def _with(self, *status: SequenceStatus, lane: Lane | None = None) -> list[Sequence]:
        return [s for s in self.sequences if s.status in status and lane in (None, s.lane)]

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        while self.scheduler.has_work():
            self.step(1)
        stats = self.scheduler.stats
        assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)
        assert stats.free_blocks == stats.total_blocks == POOL
        for sequence in self.sequences:
            output, reason = self.harness.reference(sequence)
            got, finish = self.harness.output[sequence.id], self.harness.finish.get(sequence.id)
            if sequence.id in self.aborted or finish in ("expired", "failed"):
                assert got == output[: len(got)]
                assert finish != "failed" or sequence.id in self.failed
                assert finish is None or sequence.id not in self.aborted
            else:
                assert (got, finish) == (output, reason)


class TestSchedulerMachine(SchedulerMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.slow
class TestSchedulerMachineAtLength(SchedulerMachine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=40)
