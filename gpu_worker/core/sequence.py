"""One request while the engine works on it.

Only the scheduler writes a sequence's counters, block table and status; the model runner reads them. The one rule of
the engine: `num_computed_tokens` (tokens whose KV is in blocks) catches up with `num_tokens`. Prefill, chunked
prefill, prefix hits, resumption after preemption or from another worker, and verification of drafts are all this rule.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from shared.messages import Lane, Sampling


class SequenceStatus(enum.Enum):
    """Where a sequence is. `PREEMPTED` waits again, its blocks given back."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and counters of one request.

    Attributes:
        id: Request id, unique in the engine.
        token_ids: Prompt, then tokens emitted by earlier attempts, then tokens generated here.
        num_prompt_tokens: Length of the prompt alone.
        sampling: How to sample and when to stop.
        arrival: Monotonic seconds; orders sequences of equal lane and priority.
        deadline: Monotonic seconds after which the sequence is expired, or None.
        salt: Tenant salt of the prefix cache.
        eos_token_ids: Tokens that end the sequence, unless `sampling.ignore_eos`.
        max_tokens: Generated tokens at most, over all attempts.
        num_computed_tokens: Tokens whose KV is in `block_table`.
        num_cached_tokens: Prompt tokens found in the prefix cache at first admission.
        block_table: Ids of the blocks that hold the KV, in order.
        row: Stable row of the model runner's batch state while running, else None.
    """

    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    lane: Lane = "interactive"
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    salt: bytes = b""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    row: int | None = None
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, computed or not."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated over all attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens
