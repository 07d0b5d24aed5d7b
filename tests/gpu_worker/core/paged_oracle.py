"""A model runner that proves the block tables right.

Its "KV" of a position is a hash of all tokens up to there (and of the tenant), its "model" derives the next token from
the KV of the last position, and it reads every position back through the block table. So it notices a block that was
reused too early, shared wrongly, skipped or written by two sequences; and `reference_tokens` is what a contiguous model
would have generated.
"""

from hashlib import blake2b

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry, SampledTokens, ScheduledSequence, StepPlan, StepResult


def content(previous: int, token_id: int) -> int:
    """KV of a position, from the KV before it."""
    return int.from_bytes(blake2b(f"{previous}/{token_id}".encode(), digest_size=8).digest())


def contents(salt: bytes, token_ids: list[int]) -> list[int]:
    """KV of all positions, as a contiguous model has it."""
    result, last = [], int.from_bytes(blake2b(salt, digest_size=8).digest())
    for token_id in token_ids:
        last = content(last, token_id)
        result.append(last)
    return result


def reference_tokens(
    salt: bytes, prompt: list[int], limit: int, stop_ids: frozenset[int], vocab_size: int
) -> tuple[list[int], str]:
    """What the model generates after `prompt`: at most `limit` tokens, and why it ends."""
    last, output = contents(salt, prompt)[-1], []
    while len(output) < limit:
        output.append(last % vocab_size)
        if output[-1] in stop_ids:
            return output, "stop"
        last = content(last, output[-1])
    return output, "length"


class OracleRunner:
    """Executes plans on a paged memory of hashes; raises AssertionError on any wrong read or write."""

    def __init__(self, block_size: int, vocab_size: int = 5) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.plans: list[StepPlan] = []
        self.num_computed_tokens = 0
        self._memory: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.num_computed_tokens += plan.num_tokens
        expected = [contents(item.sequence.salt, item.sequence.token_ids) for item in plan.scheduled]
        written: set[int] = set()
        for item, values in zip(plan.scheduled, expected, strict=True):
            for position in range(item.start, item.start + item.num_tokens):
                slot = self._slot(item.sequence, position)
                assert slot not in written, f"two tokens of one step share slot {slot}"
                written.add(slot)
                self._memory[slot] = values[position]
        return StepResult(
            plan.step, [self._sample(item, values) for item, values in zip(plan.scheduled, expected, strict=True)]
        )

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _sample(self, item: ScheduledSequence, values: list[int]) -> SampledTokens:
        sequence, end = item.sequence, item.start + item.num_tokens
        read = [self._memory.get(self._slot(sequence, position)) for position in range(end)]
        assert read == values[:end], f"{sequence.id} reads wrong KV at {item.start}"
        prompt_logprobs = ()
        if sequence.sampling.prompt_logprobs is not None:
            seen = sequence.token_ids[item.start + 1 : min(end + 1, sequence.num_prompt_tokens)]
            prompt_logprobs = tuple(LogprobEntry(token_id, -1.0) for token_id in seen)
        assert end == sequence.num_tokens or not item.samples
        tokens = (values[end - 1] % self.vocab_size,) if item.samples else ()
        return SampledTokens(tokens, prompt_logprobs=prompt_logprobs)
