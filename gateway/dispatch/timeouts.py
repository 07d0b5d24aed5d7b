"""The limits of recovery, and which requests exceed one: they wait for a claim, or for frames after NATS came back.

`Timeouts` changes nothing: recovery moves the requests that timed out.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.dispatch.inflight import Flight
from gateway.fleet.fleet import Fleet
from shared.prefixes import MAX_WAIT_S


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """How often, and after which silence, attempts are moved. Times are seconds.

    Attributes:
        max_moves: Moves without progress in between, except those for which no worker was at fault.
        stall_s: Silence about a request that has begun to generate.
        prefill_stall_s: Silence about a claimed request before its first token.
        ack_timeout_s: Wait for the queue's acknowledgement.
        refused_retry_s: Wait until a request that the queue has refused is published again.
        claim_timeout_s: Wait for a claim while a worker has room and the queue looks empty; doubles each time.
        disturbed_claim_timeout_s: The same while a worker is silent or has just died; doubles up to `claim_timeout_s`.
        after_death_claim_timeout_s: The same for a request that was published before a worker died and may have been
            delivered to it; doubles too.
        delivered_claim_timeout_s: Wait for a claim of a request that was delivered to some worker; doubles each time.
        suspect_claim_timeout_s: Wait for a claim of a suspect, which may have to wait for others; doubles each time.
        tokens_per_timeout_s: Prompt tokens that lengthen these timeouts by a second: tokenizing takes time too.
        reconnect_timeout_s: Silence about a generating request after NATS came back: its last frames may be lost.
        reconnect_prefill_timeout_s: The same for a claimed request before its first token.
        reconnect_prefill_rate: Prompt tokens that lengthen that by a second.
        held_back_s: Absence of NATS after which new requests are refused. A connection that was cut, or was lost in a
            pause of this process, is back sooner.
        outage_timeout_s: Absence of NATS after which all requests are failed, and of its stream or the leader of this
            after which those are that have not begun.
    """

    max_moves: int = 16
    stall_s: float = 10.0
    prefill_stall_s: float = 60.0
    ack_timeout_s: float = 3.0
    refused_retry_s: float = 0.5
    claim_timeout_s: float = 1.0
    disturbed_claim_timeout_s: float = 0.5
    after_death_claim_timeout_s: float = 0.15
    delivered_claim_timeout_s: float = 2.5
    suspect_claim_timeout_s: float = 5.0
    tokens_per_timeout_s: float = 10_000.0
    reconnect_timeout_s: float = 0.8
    reconnect_prefill_timeout_s: float = 1.0
    reconnect_prefill_rate: float = 1000.0
    held_back_s: float = 0.5
    outage_timeout_s: float = 15.0


class Timeouts:
    """Decides which flights have timed out. `now` is loop time."""

    def __init__(self, limits: RecoveryLimits, fleet: Fleet) -> None:
        self._limits = limits
        self._fleet = fleet

    def is_unclaimed(
        self, flight: Flight, now: float, is_disturbed: bool, waiting: frozenset[int] = frozenset()
    ) -> bool:
        """Whether no worker will claim the attempt: its message did not arrive, or a dead worker has it.

        `waiting` are the stream sequences of requests of the model that wait for the holder of their prefix.
        """
        limits = self._limits
        waited_s = now - flight.published_at
        if flight.ack is not None:
            return waited_s > limits.ack_timeout_s
        if flight.stream_seq is None:
            return waited_s > limits.refused_retry_s
        grace_s = flight.estimated_tokens / limits.tokens_per_timeout_s
        if flight.stream_seq in waiting:
            # No longer: its worker may say so for ever.
            grace_s += MAX_WAIT_S
        factor = 2 ** (flight.num_unclaimed - flight.num_disturbed)
        delivered_at = flight.delivered_at
        if delivered_at is not None and now - delivered_at > limits.delivered_claim_timeout_s * factor + grace_s:
            return True
        if flight.probation:
            timeout_s = limits.suspect_claim_timeout_s * factor
        elif is_disturbed:
            timeout_s = min(limits.claim_timeout_s, self._disturbed_timeout_s(flight) * 2**flight.num_disturbed)
        else:
            timeout_s = limits.claim_timeout_s * factor
        # NATS may not have delivered recent publications yet to a worker whose heartbeats are late.
        since = now - limits.claim_timeout_s / 2
        return waited_s > timeout_s + grace_s and self._fleet.can_claim(
            flight.request.model, flight.queue, flight.stream_seq, flight.published_at, since
        )

    def has_lost_frames(self, flight: Flight, worker: str, now: float) -> bool:
        """Whether the last frames of a request were lost while NATS was away; none have come since.

        The heartbeats of its worker prove it where they can; otherwise a timeout decides.
        """
        has_output = bool(flight.emitted)
        if self._fleet.liveness.has_resumed(worker, now, has_output=has_output):
            return True
        limits = self._limits
        timeout_s = limits.reconnect_timeout_s
        if not has_output:
            timeout_s = limits.reconnect_prefill_timeout_s + flight.estimated_tokens / limits.reconnect_prefill_rate
        return flight.reconnected_at < now - timeout_s

    def _disturbed_timeout_s(self, flight: Flight) -> float:
        """Return how long a flight waits for a claim that may have been sent to a worker that is dead or silent."""
        may_be_lost = self._fleet.liveness.deaths.latest(flight.request.model) >= flight.published_at
        return self._limits.after_death_claim_timeout_s if may_be_lost else self._limits.disturbed_claim_timeout_s
