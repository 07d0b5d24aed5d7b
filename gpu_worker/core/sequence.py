"""One request while the engine works on it.

Only the scheduler writes its counters, block table and status. The one rule of the engine: `num_computed_tokens`
(tokens whose KV is in blocks) catches up with `num_tokens`. Prefill, prefix hits, resumption and verification of drafts
are all this rule. Both run ahead of the device: what a step will have computed counts from when it is planned.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gpu_worker.core.block_budget import BlockBudget, BlockScores
from gpu_worker.core.constraint import OutputConstraint
from gpu_worker.core.group_tables import StateSlot, WindowTable
from gpu_worker.core.media import MediaSpan, PreparedImage
from gpu_worker.core.pooling import PoolingPlan
from shared.cache_hints import CacheHints
from shared.messages import Lane
from shared.sampling import Sampling

MAX_PARTS = 16
"""At most this many prefill parts and preemptions are listed; later ones are added to the last entry."""


@dataclass(slots=True)
class PrefillRecord:
    """Steps that computed more than a decode: when the first began, when the last landed, and their tokens."""

    began_at: float
    landed_at: float
    num_tokens: int


@dataclass(slots=True)
class SequenceRecord:
    """Times are monotonic seconds, shares seconds of the device.

    Attributes:
        device_s: Its shares of all steps; the other shares are parts of this one.
        prefill_s: Of steps that computed more than a decode.
        rejected_s: Of drafts that were not accepted.
        recomputed_s: Of tokens that had been computed before a preemption.
        num_lost_tokens: Tokens that were computed before the last preemption.
        prefills: Of the prompt, and of what a preemption lost.
        preempted_at: The first preemptions.
        is_closed: Its receipt is written. The one attribute that the consumer writes: it ends requests while the engine
            computes for them.
    """

    device_s: float = 0.0
    prefill_s: float = 0.0
    rejected_s: float = 0.0
    recomputed_s: float = 0.0
    num_lost_tokens: int = 0
    prefills: list[PrefillRecord] = field(default_factory=list)
    preempted_at: list[float] = field(default_factory=list)
    is_closed: bool = False

    def preempt(self, num_computed_tokens: int, now: float) -> None:
        """Note that the computed tokens are lost."""
        self.num_lost_tokens = max(self.num_lost_tokens, num_computed_tokens)
        if len(self.preempted_at) < MAX_PARTS:
            self.preempted_at.append(now)

    def prefill(self, start: int, num_tokens: int, share_s: float, began_at: float, landed_at: float) -> None:
        """Note a step that computed a part of the known tokens."""
        self.prefill_s += share_s
        num_again = min(start + num_tokens, self.num_lost_tokens) - start
        if num_again > 0:
            self.recomputed_s += share_s * num_again / num_tokens
        if len(self.prefills) < MAX_PARTS:
            self.prefills.append(PrefillRecord(began_at, landed_at, num_tokens))
        else:
            self.prefills[-1].landed_at = landed_at
            self.prefills[-1].num_tokens += num_tokens


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
        token_ids: Prompt, then tokens emitted by earlier attempts, then tokens generated here.
        arrival: Monotonic seconds; orders sequences of equal lane and priority.
        tenant: Who shares slots and blocks with others, in the interactive lane, and tokens in both.
        key: Who shares its tenant's tokens with other keys.
        weight: Tokens count by this much less for its tenant and key.
        salt: What roots the digests of its blocks: tenant, salt of the request, and content of the adapter.
        hints: What its client says of how long its blocks are of use.
        adapter: The slot of its adapter, which is its own until the sequence has left the engine; None without.
        max_tokens: Generated tokens at most, over all attempts.
        num_computed_tokens: Tokens whose KV is in `block_table`, or is being written there by a step in flight.
        next_boundary: Computed tokens from which the planner looks at a decode again: it fills a block, or its next
            token is the last.
        next_publish: Known tokens from which the scheduler looks at a landed decode again: blocks are published or
            given back, or the next token is the last.
        last_chunk_step: Number of the last step that was planned with more than a decode of it.
        part: Which part of the blocks that keep all tokens it belongs to while it runs.
        block_table: Ids of the blocks that hold the KV, in order, of the layers that keep all tokens.
        row: Its place in the batch from the plan that tells it to the runner until it departs, else None.
        num_told_tokens: Tokens that plans have told since then.
        max_num_tokens: Length at which the sequence ends, from `max_tokens` and the model's context.
        num_input_tokens: Tokens that were known when it came: its prompt, and what earlier attempts have emitted.
        num_charged_tokens: Computed tokens that its tenant and key were charged with; see `VirtualCounters`.
        order: Smaller goes first: by lane (sequences on trial between the lanes), then by arrival, which each level of
            priority sets back. Unique.
        expected_blocks: Blocks that admission counted for it; those beyond `block_table` are promised, not held.
        block_digests: Chained digests of its full blocks, as far as they were needed yet.
        num_findable_blocks: Blocks of `block_table` that are in the prefix cache or were considered for it.
        num_prompt_logprobs: Prompt log probabilities reported so far; recomputing the prompt does not repeat them.
        needs_last_token: A step can be planned for it only when the host knows its last token, which says what may
            follow. So no step is planned behind one in flight that samples for it.
        acceptance: Recent share of accepted draft tokens, as the policy of speculation keeps it; None before the first.
        trial_end: Known tokens up to which a batch sequence is on trial: it may end the worker, and others wait for
            what comes of it. It goes before all other batch sequences.
        was_restored: Lower tiers were asked for its prefix since it began to wait.
        pooled: What steps have contributed to that since its first token was computed: float64 numbers.
        budget: Blocks of `block_table` that it may hold; None for as many as its tokens need.
        scores: Of these blocks, where the budget's policy goes by them.
        num_evicted_tokens: Computed tokens that have left `block_table`, a whole number of blocks.
        has_lost_eviction: A step failed that may have evicted for it, and it was computed again.
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
    tenant: str = ""
    key: str = ""
    weight: float = 1.0
    salt: bytes = b""
    hints: CacheHints | None = None
    adapter: int | None = None
    trace: str = ""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    next_boundary: int = 0
    next_publish: int = 0
    last_chunk_step: int = 0
    num_cached_tokens: int = 0
    part: int = 0
    block_table: list[int] = field(default_factory=list)
    window_tables: tuple[WindowTable, ...] = ()
    state_slot: StateSlot | None = None
    row: int | None = None
    num_told_tokens: int = 0
    num_told_blocks: int = 0
    num_preemptions: int = 0
    stop_ids: frozenset[int] = frozenset()
    max_num_tokens: int = 0
    num_input_tokens: int = 0
    num_charged_tokens: int = 0
    order: tuple[int, float, int] = (0, 0.0, 0)
    expected_blocks: int = 0
    block_digests: list[bytes] = field(default_factory=list)
    num_findable_blocks: int = 0
    num_prompt_logprobs: int = 0
    prediction: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    needs_last_token: bool = False
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    constraint: OutputConstraint | None = None
    acceptance: float | None = None
    pooling: PoolingPlan | None = None
    pooled: list[bytes] = field(default_factory=list)
    scheduled_at: float | None = None
    trial_end: int = 0
    was_restored: bool = False
    num_restored_blocks: int = 0
    media: tuple[MediaSpan, ...] = ()
    images: tuple[PreparedImage, ...] = ()
    record: SequenceRecord = field(default_factory=SequenceRecord)
    budget: BlockBudget | None = None
    scores: BlockScores | None = None
    num_evicted_tokens: int = 0
    has_lost_eviction: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens known or being sampled, computed or not.

        Behind computed tokens there is one more, known or being sampled, unless no more are wanted.
        """
        num_known, num_next = len(self.token_ids), self.num_computed_tokens + 1
        if num_next <= num_known:
            return num_known
        return num_next if num_next <= self.max_num_tokens else max(num_known, self.max_num_tokens)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that steps in flight are sampling and that are not in `token_ids` yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known tokens that were generated, over all attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV no step has computed or is computing."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_computable_tokens(self) -> int:
        """Those of them that a step can compute: its budget may have room for fewer before something is evicted."""
        count = self.num_uncomputed_tokens
        if self.budget is None:
            return count
        return min(count, self.budget.num_tokens + self.num_evicted_tokens - self.num_computed_tokens)

    @property
    def is_on_trial(self) -> bool:
        """Return whether it has still to show that it does not end the worker."""
        return len(self.token_ids) < self.trial_end

    @property
    def wants_token(self) -> bool:
        """Return whether another token may be sampled, beyond those being sampled.

        False from the start when only the prompt's log probabilities or a vector of it are wanted.
        """
        return self.num_tokens < self.max_num_tokens

    @property
    def reports_prompt(self) -> bool:
        """Return whether computing the prompt gives an answer even where no token is wanted."""
        return self.pooling is not None or self.sampling.prompt_logprobs is not None

    def num_evicted_at(self, num_output_tokens: int) -> int:
        """Return how many tokens had been evicted when this many were generated, the last of them not computed."""
        num_computed = max(0, self.num_prompt_tokens + num_output_tokens - 1)
        return 0 if self.budget is None else self.budget.num_evicted_tokens(num_computed)

    @property
    def needs_one_step(self) -> bool:
        """Return whether all its tokens have to be computed in one step."""
        return self.pooling is not None and self.pooling.is_whole

    @property
    def needs_whole_prompt(self) -> bool:
        """Return whether every token of the prompt has to be computed, those of a known prefix included."""
        needs_vectors = self.pooling is not None and self.pooling.needs_all_tokens
        return needs_vectors or self.sampling.prompt_logprobs is not None
