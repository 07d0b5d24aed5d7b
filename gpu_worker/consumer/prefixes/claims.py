"""Claims of requests that other workers have pulled, and whose prefix this worker holds, or whose adapter.

An offer is claimed when the request could begin here at once, with fewer prompt tokens before it than the prefix saves.
Others are remembered until there is room. What only has the beginning of several conversations in common, such as a
system prompt, is claimed by a worker that has no more requests than the one that offers it, and whose memory is not
fuller by more than that beginning: else new conversations would leave the others' memory empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_worker.consumer.prefixes.held import HeldPrefixes
from gpu_worker.consumer.prefixes.messages import AdapterState, Answer, EngineState, Grant, Offer, Peers, Reply, Timer
from gpu_worker.consumer.prefixes.waiting import ANSWER_S
from gpu_worker.consumer.pull_capacity import PullCapacity
from gpu_worker.consumer.queued_message import QueuedMessage, delivery

MAX_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class _Claim:
    """A claim whose grant is awaited; `num_blocks` are kept for it, and `num_tokens` of it are to be computed."""

    num_blocks: int
    num_tokens: int
    timer: Timer


@dataclass(eq=False)
class PrefixClaims:
    """Answers the offers of `peers`. Owns those that are remembered, and the claims that are not granted yet.

    What has more than `most_new()` tokens to compute is declined.
    """

    _held: HeldPrefixes
    _engine: EngineState
    _capacity: PullCapacity
    _peers: Peers
    _most_new: Callable[[], float] = lambda: math.inf
    _adapters: AdapterState | None = None
    _later: dict[tuple[str, int], tuple[Offer, float]] = field(default_factory=dict)
    _claimed: dict[tuple[str, int], _Claim] = field(default_factory=dict)
    _begin: Callable[[QueuedMessage], object] | None = None

    def start(self, begin: Callable[[QueuedMessage], object]) -> None:
        """Call `begin` with each request that is granted."""
        self._begin = begin

    def stop(self) -> None:
        """Claim nothing any more; requests granted from now on stay with the worker that offered them."""
        self._begin = None
        self._later.clear()

    def receive_offer(self, offer: Offer) -> None:
        """Claim a request, remember it, or decline."""
        reply = self._reply(offer)
        if reply == "later":
            if len(self._later) >= MAX_REMEMBERED:
                reply = "decline"
            else:
                self._later[offer.worker, offer.number] = offer, self._peers.time() + offer.expires_s
        self._answer(offer, reply)

    def receive_grant(self, grant: Grant) -> None:
        """Begin a granted request."""
        claim = self._forget(grant.worker, grant.number)
        message = delivery(grant.subject, grant.data, grant.ack_subject)
        begin = self._begin
        if claim is None or begin is None or message is None:
            self._peers.send(grant.worker, Answer(self._peers.worker, grant.number, "decline"))
            return
        self._peers.send(grant.worker, Answer(self._peers.worker, grant.number, "taken"))
        begin(message)

    def review(self) -> None:
        """Claim what there is room for now, the oldest first."""
        if not self._later:
            return
        now = self._peers.time()
        for key, (offer, expires_at) in list(self._later.items()):
            reply: Reply = "decline" if now >= expires_at else self._reply(offer)
            if reply != "later":
                del self._later[key]
                if now < expires_at:
                    self._answer(offer, reply)

    def _reply(self, offer: Offer) -> Reply:
        if self._begin is None or self._capacity.is_resting():
            return "decline"
        if offer.adapter is not None and self._adapters is not None and self._adapters.is_resident(offer.adapter):
            return self._adapter_reply(offer)
        if not offer.links:
            return "claim" if offer.adapter is None and self._has_more_room(offer) else "decline"
        held = self._held.longest(offer.links)
        if held is None or held.num_tokens <= offer.num_held:
            return "decline"
        num_new = max(0, offer.num_tokens - held.num_tokens)
        if num_new > self._most_new():
            return "decline"
        if held.is_shared and not self._is_no_fuller(offer, held.num_tokens, num_new):
            return "decline"
        is_soon = self._backlog <= held.num_tokens - offer.num_held + offer.backlog
        return "claim" if is_soon and self._capacity.can_claim(offer.num_tokens) else "later"

    @property
    def _backlog(self) -> int:
        """Prompt tokens to compute here before a request that is claimed now."""
        return self._engine.stats.waiting_tokens + sum(claim.num_tokens for claim in self._claimed.values())

    def _adapter_reply(self, offer: Offer) -> Reply:
        """Claim a request whose adapter is here if the wait here is no longer than loading the adapter there."""
        if self._num_new(offer) > self._most_new():
            return "decline"
        is_soon = self._backlog <= offer.backlog + offer.expires_s * self._engine.stats.expected_prefill_rate
        return "claim" if is_soon and self._capacity.can_claim(offer.num_tokens) else "later"

    def _num_new(self, offer: Offer) -> int:
        held = self._held.longest(offer.links)
        return max(0, offer.num_tokens - (0 if held is None else held.num_tokens))

    def _is_no_fuller(self, offer: Offer, num_held: int, num_new: int) -> bool:
        """Whether a request that shares no more than a common beginning does not have more room where it was pulled."""
        if self._capacity.num_interactive > offer.num_requests:
            return False
        if offer.num_blank < self._capacity.num_blocks_for(num_new):
            return True
        return self._engine.num_blank_blocks + self._capacity.num_blocks_for(num_held) >= offer.num_blank

    def _has_more_room(self, offer: Offer) -> bool:
        """Whether a conversation that begins has more memory here, and would not wait for others."""
        stats, num_blocks = self._engine.stats, self._capacity.num_blocks_for(offer.num_tokens)
        is_idler = self._capacity.num_interactive <= offer.num_requests and stats.waiting_tokens <= offer.backlog
        if offer.num_tokens > self._most_new():
            return False
        is_emptier = self._engine.num_blank_blocks >= offer.num_blank + num_blocks
        return is_idler and is_emptier and self._capacity.can_claim(offer.num_tokens)

    def _answer(self, offer: Offer, reply: Reply) -> None:
        if reply == "claim":
            # A number that is offered again is one claim: the first reservation would be kept for ever.
            self._forget(offer.worker, offer.number)
            num_blocks = self._capacity.num_blocks_for(offer.num_tokens)
            self._capacity.reserve(1, num_blocks)
            timer = self._peers.call_later(2 * ANSWER_S, lambda: self._forget(offer.worker, offer.number))
            self._claimed[offer.worker, offer.number] = _Claim(num_blocks, self._num_new(offer), timer)
        self._peers.send(offer.worker, Answer(self._peers.worker, offer.number, reply))

    def _forget(self, worker: str, number: int) -> _Claim | None:
        claim = self._claimed.pop((worker, number), None)
        if claim is not None:
            claim.timer.cancel()
            self._capacity.reserve(-1, -claim.num_blocks)
        return claim
