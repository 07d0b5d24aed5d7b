"""A scheduler with the oracle runner behind it, and what came out of it."""

from gpu_worker.core.scheduler import Scheduler, SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SequenceEvent, StepPlan
from shared.messages import FinishReason
from tests.gpu_worker.core.paged_oracle import OracleRunner, reference_tokens

BLOCK = 4


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
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=BLOCK,
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                enable_prefix_caching=enable_prefix_caching,
                headroom_tokens=headroom_tokens,
            )
        )
        self.runner = OracleRunner(BLOCK, vocab_size)
        self.now = 0.0
        self.output: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.output[sequence.id] = sequence.token_ids[sequence.num_prompt_tokens :]
            self.scheduler.add(sequence)

    def step(self) -> list[SequenceEvent]:
        return self.settle(self.schedule())

    def schedule(self) -> StepPlan:
        return self.scheduler.schedule(self.now)

    def settle(self, plan: StepPlan) -> list[SequenceEvent]:
        return self.collect(self.scheduler.settle(plan, self.runner.execute(plan)))

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
        limit = min(sequence.max_tokens, self.scheduler.config.max_num_tokens - len(prompt))
        return reference_tokens(sequence.salt, prompt, limit, sequence.stop_ids, self.runner.vocab_size)

    def assert_reference(self, *sequences: Sequence) -> None:
        """Every sequence ended with the tokens and the reason of a contiguous model that ran it alone."""
        for sequence in sequences:
            assert (self.output[sequence.id], self.finish[sequence.id]) == self.reference(sequence)
