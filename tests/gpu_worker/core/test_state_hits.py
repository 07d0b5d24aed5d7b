"""How many prompt tokens of a model with recurrent states are found, next to an oracle that keeps every state."""

from __future__ import annotations

import random

import pytest

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig, StateConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SampledTokens, StepResult
from gpu_worker.execution.memory.state_sizes import checkpoints_a_block, num_sure_slots
from gpu_worker.start.config import WorkerConfig
from shared.sampling import Sampling

BLOCK, VOCAB, NUM_BLOCKS = 16, 50_000, 20_000


class Served:
    """Serves one request after another; counts the prompt tokens that were found and that could have been."""

    def __init__(self, num_slots: int) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=BLOCK,
                num_blocks=NUM_BLOCKS,
                max_num_seqs=8,
                max_num_batched_tokens=512,
                max_model_len=100_000,
                state=StateConfig(num_slots, interval_blocks=64),
            )
        )
        self.known: set[tuple[int, ...]] = set()
        self.random = random.Random(7)
        self.num_hits = self.num_possible = self.num_requests = 0

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def serve(self, prompt: list[int], num_output: int) -> list[int]:
        """Return the prompt and what follows it."""
        self.num_requests += 1
        sequence = Sequence(
            str(self.num_requests), list(prompt), len(prompt), Sampling(max_tokens=num_output), num_output
        )
        self.scheduler.add(sequence)
        while self.scheduler.has_work():
            plan = self.scheduler.schedule(0.0)
            assert plan is not None
            sampled = [SampledTokens(tuple(self.tokens(1)) if item.samples else ()) for item in plan.scheduled]
            self.scheduler.settle(plan, StepResult(plan.step, sampled))
        self.num_hits += sequence.num_cached_tokens
        self.num_possible += self.possible(prompt)
        text = sequence.token_ids
        # Keys of whole prefixes would be long; every block's own tokens and place tell them apart here.
        self.known |= {self.key(text, end) for end in range(BLOCK, len(text), BLOCK)}
        return text

    def possible(self, prompt: list[int]) -> int:
        """Return the tokens of the longest prefix in whole blocks that was computed before, less than all."""
        end = 0
        while end + BLOCK < len(prompt) and self.key(prompt, end + BLOCK) in self.known:
            end += BLOCK
        return end

    @staticmethod
    def key(text: list[int], end: int) -> tuple[int, ...]:
        return (end, *text[end - BLOCK : end])


@pytest.mark.parametrize("num_unique", [28, 128, 228])
def test_requests_with_tails_of_their_own_find_what_they_share(num_unique: int) -> None:
    # 64 requests of 2,000 tokens; moving 100 of them from the shared part to the own one changes nothing.
    served = Served(num_slots=16)
    shared = served.tokens(2000 - num_unique)
    served.serve(shared + served.tokens(num_unique), 4)
    served.serve(shared + served.tokens(num_unique), 4)
    served.num_hits = served.num_possible = 0
    for _ in range(62):
        served.serve(shared + served.tokens(num_unique), 4)
    assert served.num_possible == 62 * ((2000 - num_unique) // BLOCK * BLOCK)
    assert served.num_hits == served.num_possible


def agents(served: Served) -> float:
    """Serve agents that branch; return the share of what could be found that was."""
    system = served.tokens(1500)
    conversations = [served.serve(system + served.tokens(60), 40) for _ in range(4)]
    for _ in range(150):
        # Mostly the next turn of a conversation; now and then a new one, or one that leaves an older turn.
        kind, place = served.random.random(), served.random.randrange(len(conversations))
        past = conversations[place]
        if kind < 0.08:
            conversations.append(served.serve(system + served.tokens(served.random.randrange(20, 200)), 40))
        elif kind < 0.2:
            cut = served.random.randrange(len(system), len(past))
            conversations.append(served.serve(past[:cut] + served.tokens(80), 40))
        else:
            conversations[place] = served.serve(past + served.tokens(served.random.randrange(10, 300)), 40)
    return served.num_hits / served.num_possible


def test_agents_that_branch_find_nearly_all_with_the_default_share_of_memory() -> None:
    # Sizes of Qwen3.5-35B-A3B: 10 layers with two KV heads of 256 numbers; 30 with 32 states of 128 x 128 numbers and
    # what their convolutions remember.
    block_bytes = 10 * 2 * 2 * 256 * 2 * BLOCK
    slot_bytes = 30 * (32 * 128 * 128 + 3 * 8192) * 4
    share = checkpoints_a_block(WorkerConfig().state_checkpoint_ratio, block_bytes, slot_bytes)
    num_slots = num_sure_slots(8, has_blocks=True) + int(NUM_BLOCKS * share)
    found = agents(Served(num_slots))
    assert found >= 0.95, f"{found:.3f} of what could be found"
