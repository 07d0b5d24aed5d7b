"""Timeouts of single requests: how long they wait for a claim, or for frames after NATS came back.

Decides by the limits and by what the fleet knows. Changes nothing: recovery moves the requests that timed out.
"""

from __future__ import annotations

from gateway.dispatch.inflight import Flight
from gateway.dispatch.recovery_limits import RecoveryLimits
from gateway.fleet.fleet import Fleet


class Timeouts:
    """Says which flights have timed out. `now` is loop time."""

    def __init__(self, limits: RecoveryLimits, fleet: Fleet) -> None:
        """Decide by these limits."""
        self._limits = limits
        self._fleet = fleet

    def is_unclaimed(self, flight: Flight, now: float, is_disturbed: bool) -> bool:
        """Whether no worker will claim the attempt: its message did not arrive, or a dead worker has it."""
        limits = self._limits
        waited_s = now - flight.published_at
        if flight.ack is not None:
            return waited_s > limits.ack_timeout_s
        if flight.stream_seq is None:
            return waited_s > limits.refused_retry_s
        grace_s = flight.estimated_tokens / limits.tokens_per_timeout_s
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
        return waited_s > timeout_s + grace_s and self._fleet.can_claim(flight.request.model)

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
        may_be_lost = self._fleet.liveness.died_at(flight.request.model) >= flight.published_at
        return self._limits.after_death_claim_timeout_s if may_be_lost else self._limits.disturbed_claim_timeout_s
