"""The requests this worker holds: pulled, not yet acknowledged, with everything needed to answer them.

Owns the table, the count of blocks that interactive and batch requests are expected to need, and which interactive
request is on probation. Written by the lanes, on the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpu_worker.consumer.prefixes.held import PrefixChain
from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.text.output_text import OutputText
from shared.kv_budget import EvictedBlocks
from shared.messages import Lane, Request, TokenLogprob


@dataclass(slots=True)
class Prelude:
    """What goes with the first token of an answer: the echoed prompt, the prompt's log probabilities and token ids."""

    text: str = ""
    logprobs: list[TokenLogprob | None] | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class HeldRequest:
    """One request between its pull and its acknowledgement.

    Attributes:
        message: Its latest delivery; acknowledged after the last delta has been published.
        sequence: Set when the prompt has been encoded and given to the engine.
        prelude: Data about the prompt still to be sent with the first token.
        adapter: Digest of the adapter that is kept in memory for it; None without, and before it was asked for.
        chain: Digests of the beginnings of its prompt, by which other workers know that they hold one.
        in_reasoning: Its prompt has opened the model's reasoning, and the answer begins inside of it.
        num_blocks: Blocks that it is expected to need beyond those shared with others.
        is_plain: Its tokens need only be decoded: no stop strings, no log probabilities, no prelude to send.
        parts: Text so far, of a request whose answer is delivered as a whole.
        total_logprob: Sum of the log probabilities of the tokens so far, if they are asked for, of a request whose
            answer is delivered as a whole.
        num_output_tokens: Generated tokens delivered, to the outbox or to `parts`, those of earlier attempts included.
            The engine may know more already.
        num_earlier_tokens: Those of earlier attempts.
        num_told_evictions: Evictions by attention that its gateway knows.
        num_recorded_tokens: As many of them as another worker would continue from.
        recorded_at: Monotonic seconds at which that was recorded; 0 before.
        num_tokens_before: `num_output_tokens` when it was last looked whether the request waits; -1 before.
        taken_at: Monotonic seconds at which it came.
        queued_s: For how long it had been on its way by then, by the wall clocks of both ends; 0 where it does not say.
        admitted_at: Monotonic seconds at which the engine got it; None before.
        outcome: How it ended here: a finish reason, or `dropped` if no end was sent.
        first_output_at: Monotonic seconds of the first output that was written here; None before.
        probation: Tokens that it still has to produce while it is suspected of killing workers.
        num_failed: Deliveries of a batch request since its last progress that ended with their worker.
        is_looked_up: What its record says of earlier deliveries is known, or this is the first.
        was_lost: It has lost a worker; should it lose another, that is to find more of it recorded than usual.
        is_parked: It waits for its trial (`batch_trials`), and nothing is done about it.
        is_background: A batch request for which a person waits: it is computed as interactive ones are.
        is_charged: Its trial has begun and has not cleared it: should this worker die now, that counts as its failure.
    """

    key: str
    request: Request
    message: QueuedMessage
    sequence: Sequence | None = None
    output: OutputText | None = None
    prelude: Prelude | None = None
    adapter: str | None = None
    chain: PrefixChain | None = None
    in_reasoning: bool = False
    num_blocks: int = 0
    is_plain: bool = False
    parts: list[str] = field(default_factory=list)
    total_logprob: float = 0.0
    vector: bytes | None = None
    num_output_tokens: int = 0
    num_earlier_tokens: int = 0
    num_told_evictions: int = 0
    num_recorded_tokens: int = 0
    recorded_at: float = 0.0
    num_tokens_before: int = -1
    probation: int = 0
    num_failed: int = 0
    is_looked_up: bool = True
    was_lost: bool = False
    is_parked: bool = False
    is_charged: bool = False
    is_background: bool = False
    first_output_at: float | None = None
    taken_at: float = field(default_factory=time.monotonic)
    queued_s: float = 0.0
    admitted_at: float | None = None
    outcome: str = "dropped"

    def __post_init__(self) -> None:
        if self.request.created:
            self.queued_s = max(0.0, time.time() - self.request.created)
        self.resume(len(self.request.emitted))

    def resume(self, num_tokens: int) -> None:
        """Take note of how many tokens earlier attempts generated."""
        self.num_output_tokens = self.num_earlier_tokens = self.num_recorded_tokens = num_tokens

    @property
    def evicted(self) -> EvictedBlocks | None:
        """Blocks evicted by attention, in earlier attempts too; None if there are none."""
        scores = None if self.sequence is None else self.sequence.scores
        return self.request.evicted if scores is None else scores.told(0)

    @property
    def is_untried(self) -> bool:
        """Whether it may begin to compute, but has produced nothing here yet."""
        if self.request.lane == "batch" and self.is_waiting and (self.is_parked or not self.probation):
            return False  # it may wait for as long as interactive requests come
        return self.is_without_output

    @property
    def is_waiting(self) -> bool:
        """Whether the engine has not begun to compute it here."""
        return self.sequence is None or self.sequence.status is SequenceStatus.WAITING

    @property
    def is_without_output(self) -> bool:
        """Whether it has produced nothing here yet."""
        return self.num_output_tokens == self.num_earlier_tokens


def log_fields(request: Request) -> dict[str, str]:
    """Return what names a request in log lines."""
    return {"id": request.id, "request_id": request.trace or ""}


class HeldRequests:
    """All held requests, by key and by the engine's sequence id.

    Attributes:
        on_removed: Called with each request that is removed.
        by_sequence: For reading in the hot path; only `admit` and `remove` change it.
        is_empty: Set while nothing is held.
        suspect: The interactive request on probation; written by the interactive lane, and cleared when it is removed.
        reserved_until: Monotonic seconds until which the next suspect is waited for; written by the interactive lane.
        is_withdrawn: Nothing is taken, because the engine cannot compute at present or the worker is cordoned; written
            by the consumer.
    """

    def __init__(self, removed: Callable[[HeldRequest], None] | None = None) -> None:
        self.on_removed = [] if removed is None else [removed]
        self._by_key: dict[str, HeldRequest] = {}
        self.by_sequence: dict[str, HeldRequest] = {}
        self._counts: dict[Lane, int] = {"interactive": 0, "batch": 0}
        self._blocks: dict[Lane, int] = {"interactive": 0, "batch": 0}
        self._of_tenants: dict[str, list[int]] = {}
        self._background: Counter[str] = Counter()
        self._num_admitted = 0
        self.suspect: HeldRequest | None = None
        self.reserved_until = 0.0
        self.is_withdrawn = False
        self.is_empty = asyncio.Event()
        self.is_empty.set()

    def __iter__(self) -> Iterator[HeldRequest]:
        """Iterate over a snapshot, so that requests may be removed meanwhile."""
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def has_suspect(self) -> bool:
        """Whether an interactive suspect is here, or about to come: nothing else that may be dangerous should begin."""
        return self.suspect is not None or time.monotonic() < self.reserved_until

    def get(self, key: str) -> HeldRequest | None:
        """Return the held request with this key."""
        return self._by_key.get(key)

    def count(self, lane: Lane) -> int:
        """Requests held of one lane."""
        return self._counts[lane]

    @property
    def num_background(self) -> int:
        """Batch requests held for which persons wait."""
        return self._background.total()

    def num_background_of(self, tenant: str) -> int:
        """Return how many of them are of one tenant."""
        return self._background[tenant]

    def num_blocks(self, lane: Lane) -> int:
        """Blocks that one lane's requests are expected to need."""
        return self._blocks[lane]

    @property
    def num_not_begun(self) -> int:
        """Interactive requests that wait for their first turn here."""
        return sum(each.request.lane == "interactive" and each.is_waiting for each in self._by_key.values())

    def within_shares(self, num_slots: int, num_blocks: int) -> tuple[float, float]:
        """Return how many slots and blocks interactive requests need where no tenant has more than an equal share.

        The shares are those of the tenants that have requests here and of another one, which may come.
        """
        share = 1 / (len(self._of_tenants) + 1)
        slots = sum([min(count, num_slots * share) for count, _ in self._of_tenants.values()])
        return slots, sum([min(blocks, num_blocks * share) for _, blocks in self._of_tenants.values()])

    def is_current(self, held: HeldRequest) -> bool:
        """Return whether a request is still held: an `await` may have let it be cancelled or replaced."""
        return self._by_key.get(held.key) is held

    def add(self, held: HeldRequest) -> None:
        """Take in a request whose key is not held."""
        assert held.key not in self._by_key
        self._by_key[held.key] = held
        self._counts[held.request.lane] += 1
        if held.request.lane == "interactive":
            self._of_tenants.setdefault(held.request.tenant, [0, 0])[0] += 1
        if held.is_background:
            self._background[held.request.tenant] += 1
        self.is_empty.clear()

    def next_sequence_id(self, held: HeldRequest) -> str:
        """Return an id that no other attempt has: events of an aborted sequence may still come in."""
        self._num_admitted += 1
        return f"{held.key}.{self._num_admitted}"

    def admit(self, held: HeldRequest, sequence: Sequence, output: OutputText, num_blocks: int) -> None:
        """Record the sequence that the engine computes for a request."""
        held.sequence = sequence
        held.output = output
        held.admitted_at = time.monotonic()
        self.by_sequence[sequence.id] = held
        self.expect_blocks(held, num_blocks)

    def expect_blocks(self, held: HeldRequest, num_blocks: int) -> None:
        """Change how many blocks a request is expected to need."""
        self._blocks[held.request.lane] += num_blocks - held.num_blocks
        if held.request.lane == "interactive":
            self._of_tenants[held.request.tenant][1] += num_blocks - held.num_blocks
        held.num_blocks = num_blocks

    def remove(self, held: HeldRequest) -> None:
        """Let go of a request."""
        del self._by_key[held.key]
        self._counts[held.request.lane] -= 1
        self.expect_blocks(held, 0)
        if held.request.lane == "interactive":
            of_tenant = self._of_tenants[held.request.tenant]
            of_tenant[0] -= 1
            if not of_tenant[0]:
                del self._of_tenants[held.request.tenant]
        if held.is_background:
            self._background -= Counter((held.request.tenant,))
        if held is self.suspect:
            self.suspect = None
        if held.sequence is not None:
            del self.by_sequence[held.sequence.id]
        for told in self.on_removed:
            told(held)
        if not self._by_key:
            self.is_empty.set()
