"""A scheduler with the oracle runner behind it, and what came out of it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig, StateConfig, WindowConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import DraftPolicy, Speculation
from gpu_worker.core.step import SampledTokens, ScheduledSequence, ScheduledStep, SequenceEvent, StepResult
from gpu_worker.core.tiers import KvTiers
from shared.kv_budget import MAX_BUDGETED_TOKENS
from shared.messages import FinishReason
from tests.gpu_worker.core.paged_oracle import Drafter, OracleRunner, OracleStep, reference_tokens

BLOCK = 4


@dataclass(frozen=True)
class StepCost:
    """Seconds that steps are said to take: a fixed part, one for each sequence, one for each further token."""

    fixed_s: float
    sequence_s: float
    token_s: float

    def of(self, plan: ScheduledStep) -> float:
        num_sequences = len(plan.scheduled)
        return self.fixed_s + self.sequence_s * num_sequences + self.token_s * (plan.num_tokens - num_sequences)


class Harness:
    """Steps a small scheduler and collects each sequence's tokens and finish reason."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 10_000,
        enable_prefix_caching: bool = True,
        headroom_tokens: int = 128,
        vocab_size: int = 1_000_003,
        max_steps_in_flight: int = 1,
        policy: DraftPolicy | None = None,
        drafter: Drafter | None = None,
        cost: StepCost | None = None,
        batch_slowdown: float = 0.05,
        windows: tuple[WindowConfig, ...] = (),
        state: StateConfig | None = None,
        tiers: KvTiers | None = None,
        num_parts: int = 1,
    ) -> None:
        self.cost = cost
        self.tiers = tiers
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=BLOCK,
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                enable_prefix_caching=enable_prefix_caching,
                headroom_tokens=headroom_tokens,
                batch_slowdown=batch_slowdown,
                windows=windows,
                state=state,
                num_parts=num_parts,
            ),
            None if policy is None else Speculation(policy),
            tiers=tiers,
        )
        self.runner = OracleRunner(
            BLOCK, vocab_size, max_steps_in_flight, max_num_seqs, drafter, tuple(group.window for group in windows)
        )
        self.in_flight: deque[tuple[ScheduledStep, OracleStep]] = deque()
        self.now = 0.0
        self.output: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.output[sequence.id] = sequence.token_ids[sequence.num_prompt_tokens :]
            self.scheduler.add(sequence)

    def step(self) -> list[SequenceEvent]:
        """Plan and submit as many steps as may be in flight, and land the oldest."""
        while self.can_submit() and (plan := self.try_schedule()) is not None and plan.scheduled:
            pass
        return self.land()

    def can_submit(self) -> bool:
        return len(self.in_flight) < self.runner.max_steps_in_flight

    def schedule(self) -> ScheduledStep:
        plan = self.try_schedule()
        assert plan is not None
        return plan

    def try_schedule(self) -> ScheduledStep | None:
        """Plan a step and submit it."""
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            step = self._submit(plan) if plan.scheduled else OracleStep(self.runner, plan.step, [], [], [])
            self.in_flight.append((plan, step))
        return plan

    def settle(self, plan: ScheduledStep) -> list[SequenceEvent]:
        assert self.in_flight[0][0] is plan
        return self.land()

    def land(self) -> list[SequenceEvent]:
        """Settle the oldest step."""
        plan, step = self.in_flight.popleft()
        result = step.result() if plan.scheduled else StepResult(plan.step, [])
        events = self.scheduler.settle(plan, result)
        if self.cost is not None and plan.scheduled:
            self.scheduler.observe(plan, result, self.cost.of(plan), self.now)
        return self.collect(events)

    def lose(self) -> list[ScheduledSequence]:
        """Let the oldest step fail; the steps are undone, and what the oldest did can be planned again."""
        _, step = self.in_flight.popleft()
        step.lose()
        for plan, later in self.in_flight:
            if plan.scheduled:
                later.result()
        self.in_flight.clear()
        items = self.scheduler.roll_back()
        self.collect(self.scheduler.take_events())
        return items

    def schedule_again(self, items: Iterable[ScheduledSequence]) -> ScheduledStep | None:
        """Plan and submit some of what was undone."""
        plan = self.scheduler.schedule_again(items, self.now)
        if plan is not None:
            self.in_flight.append((plan, self._submit(plan)))
        return plan

    def _submit(self, plan: ScheduledStep) -> OracleStep:
        if self.tiers is not None:
            self.tiers.flush()
        return self.runner.submit(plan)

    def fail(self, sequence: Sequence) -> list[SequenceEvent]:
        """End a sequence whose step was undone."""
        self.scheduler.fail(sequence, "broken")
        return self.collect(self.scheduler.take_events())

    def settle_as(self, *token_ids: int) -> list[SequenceEvent]:
        """Settle the oldest step with tokens of the test's choice instead of the runner's."""
        plan, _ = self.in_flight.popleft()
        sampled = [SampledTokens(token_ids if item.samples else ()) for item in plan.scheduled]
        return self.collect(self.scheduler.settle(plan, StepResult(plan.step, sampled)))

    def collect(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        for event in events:
            name, output = event.sequence.id, self.output[event.sequence.id]
            assert name not in self.finish, "an event after the last one"
            assert event.num_tokens_before == len(output), "a token was repeated or lost"
            output.extend(event.token_ids)
            if event.finish is not None:
                self.finish[name] = event.finish
        return events

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.scheduler.has_work():
            self.step()
            self.scheduler.check_integrity()
        assert self.scheduler.stats.free_blocks == self.scheduler.stats.total_blocks

    def reference(self, sequence: Sequence) -> tuple[list[int], str]:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        longest = self.scheduler.config.max_num_tokens if sequence.budget is None else MAX_BUDGETED_TOKENS
        limit = min(sequence.max_tokens, longest - len(prompt))
        return reference_tokens(sequence.salt, prompt, limit, sequence.stop_ids, self.runner.vocab_size)

    def assert_reference(self, *sequences: Sequence) -> None:
        """Every sequence ended with the tokens and the reason of a contiguous model that ran it alone."""
        for sequence in sequences:
            assert (self.output[sequence.id], self.finish[sequence.id]) == self.reference(sequence)

    def run_to_reference(self, *sequences: Sequence) -> None:
        self.run()
        self.assert_reference(*sequences)
