"""Whether a request has waited for too long: for a claim, or for frames after NATS came back.

Judges by the limits and by what the fleet knows. Changes nothing: recovery moves what has waited for too long.
"""

from __future__ import annotations

from gateway.dispatch.inflight import Flight
from gateway.dispatch.recovery_limits import RecoveryLimits
from gateway.fleet.fleet import Fleet


class Patience:
    """Judges single flights. `now` is loop time."""

    def __init__(self, limits: RecoveryLimits, fleet: Fleet) -> None:
        """Judge by these limits."""
        self._limits = limits
        self._fleet = fleet

    def is_unclaimed(self, flight: Flight, now: float, is_disturbed: bool) -> bool:
        """Whether nobody will claim what has been published: it did not arrive, or went to one that is not there."""
        limits = self._limits
        waited_s = now - flight.published_at
        if flight.ack is not None:
            return waited_s > limits.ack_timeout_s
        if flight.stream_seq is None:
            return waited_s > limits.refused_retry_s
        grace_s = flight.estimated_tokens / limits.tokens_per_patience_s
        factor = 2 ** (flight.num_unclaimed - flight.num_disturbed)
        delivered_at = flight.delivered_at
        if delivered_at is not None and now - delivered_at > limits.delivered_patience_s * factor + grace_s:
            return True
        if flight.probation:
            patience_s = limits.suspect_patience_s * factor
        elif is_disturbed:
            patience_s = min(limits.claim_patience_s, self._disturbed_patience_s(flight) * 2**flight.num_disturbed)
        else:
            patience_s = limits.claim_patience_s * factor
        return waited_s > patience_s + grace_s and self._fleet.can_claim(flight.request.model)

    def has_lost_frames(self, flight: Flight, worker: str, now: float) -> bool:
        """Whether a request of which nothing was heard since NATS came back must have lost its last frames.

        Its worker's heartbeats prove it where they can; otherwise it has waited for long.
        """
        has_output = bool(flight.emitted)
        if self._fleet.liveness.has_resumed(worker, now, has_output=has_output):
            return True
        limits = self._limits
        patience_s = limits.reconnect_patience_s
        if not has_output:
            patience_s = limits.reconnect_prefill_patience_s + flight.estimated_tokens / limits.reconnect_prefill_rate
        return flight.reconnected_at < now - patience_s

    def _disturbed_patience_s(self, flight: Flight) -> float:
        """Return how long a flight waits for a claim that may have been sent to a worker that is dead or silent."""
        is_bereaved = self._fleet.liveness.died_at(flight.request.model) >= flight.published_at
        return self._limits.bereaved_patience_s if is_bereaved else self._limits.disturbed_patience_s
