"""The role of a worker among those of its model: which queues it takes from, and whether it hands requests over.

A role steers, and binds to nothing: whatever a worker is sent it can do from beginning to end. Where no other worker
computes prompts, or none decodes, it does both. Other workers are known by their heartbeats; those of earlier versions
do both. Heartbeats may lie: what they leave in a queue for long is taken all the same (`LeftQueues`).
"""

from __future__ import annotations

import logging
import math
import time
from typing import NamedTuple

from gpu_worker.consumer.prefixes.peers import PeerBeat
from shared.consumers import Deliveries
from shared.disaggregation import PROMPT_QUEUES, Role, RoleNews, TakenQueue

LEFT_S = 10.0
"""Seconds without a delivery after which waiting requests count as left."""
FIRST_HELP_S = 10.0
MOST_HELP_S = 60.0

_log = logging.getLogger(__name__)


class LeftQueues:
    """Notices requests left to workers of another role that none of them takes, by what NATS has delivered.

    Owns since when each queue stands still, and until when this worker takes from all. Times are monotonic seconds.

    Each time that a queue stands still again soon after, this worker helps for twice as long: a worker that announces
    a role and takes nothing delays few requests.
    """

    def __init__(self) -> None:
        self._stands_since: dict[TakenQueue, tuple[int, float]] = {}
        self._help_s = 0.0
        self._helps_until: float | None = None

    def helps(self, now: float) -> bool:
        """Return whether this worker takes requests of all queues at present."""
        return self._helps_until is not None and now < self._helps_until

    def note(self, queue: TakenQueue, deliveries: Deliveries, now: float) -> None:
        """Take note of what NATS says of a queue that is left to others."""
        if not deliveries.num_waiting:
            self._stands_since.pop(queue, None)
            return
        num_delivered, since = self._stands_since.get(queue, (None, now))
        if num_delivered != deliveries.num_delivered:
            self._stands_since[queue] = deliveries.num_delivered, now
        elif now - since >= LEFT_S:
            self._begin_to_help(queue, now)

    def forget(self) -> None:
        """Start over: the observations so far are old."""
        self._stands_since.clear()

    def _begin_to_help(self, queue: TakenQueue, now: float) -> None:
        is_again = self._helps_until is not None and now - self._helps_until < MOST_HELP_S
        self._help_s = min(2 * self._help_s, MOST_HELP_S) if is_again else FIRST_HELP_S
        self._helps_until = now + self._help_s
        self.forget()
        _log.warning(
            "the workers that take from a queue by their heartbeats took nothing; this one does for a while",
            extra={"queue": queue, "help_s": self._help_s},
        )


HEARD_S = 2.0
"""A worker not heard for this long counts as gone; decode workers then compute prompts themselves."""
MISSED_S = 0.3
"""A heartbeat is missed after so long. NATS is asked then whether the worker has ended; one that is slow has not."""
READY_MEMORY_S = 600.0
"""Seconds after a prefill worker's heartbeat in which there may be requests that it has handed over."""
MAX_PEERS = 1024
MOST_CLAIMED_BY_DECODER = 128
"""Tokens of a next turn that a worker that decodes computes itself: they take a step or two."""


_DOES_BOTH = RoleNews()


class _Peer(NamedTuple):
    heard_at: float
    news: RoleNews
    is_draining: bool
    is_listening: bool


class Roles:
    """Owns the role of this worker and the news of the others. Times are monotonic seconds.

    Attributes:
        role: Of this worker; changed by orders.
        maker: Identifies the computation: KV of another maker is of no use here (`RoleNews.maker`).
        left_queues: Whether others take what this worker leaves to them.
    """

    def __init__(self, worker: str, role: Role) -> None:
        self.role = role
        self.maker = ""
        self.left_queues = LeftQueues()
        self._worker = worker
        self._peers: dict[str, _Peer] = {}
        self._started_at = self._connected_at = time.monotonic()
        self._prefill_heard_at: float | None = None

    def note(self, beat: PeerBeat, now: float) -> None:
        """Take note of another worker's heartbeat."""
        if beat.worker == self._worker:
            return
        self._peers.pop(beat.worker, None)
        if len(self._peers) >= MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        news = beat.roles or _DOES_BOTH
        self._peers[beat.worker] = _Peer(now, news, beat.draining, beat.prefixes is not None)
        if news.role == "prefill":
            self._prefill_heard_at = now

    def note_reconnected(self, now: float) -> None:
        """Take note that NATS was away: others may not be back yet."""
        self._connected_at = now

    @property
    def most_claimed(self) -> float:
        """Tokens that a request may have to be computed still, if this worker takes it because it holds its prefix."""
        return MOST_CLAIMED_BY_DECODER if self.role == "decode" else math.inf

    def takes(self, now: float) -> tuple[TakenQueue, ...]:
        """Return the queues from which this worker takes requests at present."""
        if self.left_queues.helps(now):
            return (*PROMPT_QUEUES, "ready")
        if self.role == "prefill":
            return PROMPT_QUEUES
        if self.role == "decode":
            is_new = now - self._started_at < HEARD_S
            if is_new or any(news.role != "decode" for news in self._live(now, HEARD_S)):
                return ("ready",)
            return (*PROMPT_QUEUES, "ready")
        heard_at = self._prefill_heard_at
        return (*PROMPT_QUEUES, "ready") if heard_at and now - heard_at < READY_MEMORY_S else PROMPT_QUEUES

    def left(self, now: float) -> tuple[TakenQueue, ...]:
        """Return the queues that this worker leaves to others which are to take from them, by their heartbeats."""
        if self.role == "decode":
            return () if "interactive" in self.takes(now) else PROMPT_QUEUES
        return ("ready",) if self.hands_over(now) else ()

    def missed(self, now: float) -> list[str]:
        """Return the workers whose part this one takes over if they have ended: none was heard for `MISSED_S`.

        For a decode worker these are the workers that compute prompts, for a prefill worker those that go on behind
        the first token. Only workers that listen on their peer subject and were heard since the last reconnection: for
        others, no subscriber does not mean the end.
        """
        if self.role == "both" or any(self._needs(news) for news in self._live(now, MISSED_S)):
            return []
        heard_after = max(now - HEARD_S, self._connected_at)
        known = [(name, peer) for name, peer in self._peers.items() if peer.heard_at > heard_after]
        return [name for name, peer in known if self._needs(peer.news) and peer.is_listening]

    def note_ended(self, worker: str, asked_at: float) -> None:
        """Forget a worker that had ended at `asked_at`, unless its successor was heard since."""
        if (peer := self._peers.get(worker)) is not None and peer.heard_at <= asked_at:
            del self._peers[worker]

    def hands_over(self, now: float) -> bool:
        """Return whether another worker continues requests begun here."""
        if self.role != "prefill" or self.left_queues.helps(now):
            return False
        return any(map(self._needs, self._live(now, HEARD_S)))

    def address(self, worker: str, now: float) -> str | None:
        """Return the address of another worker's KV; None if it is silent, or its maker differs."""
        peer = self._peers.get(worker)
        if peer is None or now - peer.heard_at > HEARD_S or peer.news.maker != self.maker:
            return None
        return peer.news.address if self.maker and peer.news.address else None

    def _needs(self, news: RoleNews) -> bool:
        """Return whether a worker does the part of a request that this one leaves to others."""
        if self.role == "decode":
            return news.role != "decode"
        return bool(self.maker) and "ready" in news.takes and news.maker == self.maker

    def _live(self, now: float, heard_s: float) -> list[RoleNews]:
        return [each.news for each in self._peers.values() if not each.is_draining and now - each.heard_at <= heard_s]
