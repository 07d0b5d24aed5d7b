"""The limits of recovery: timeouts, and how often a request is moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """How often, and after which silence, attempts are moved. Times are seconds.

    Attributes:
        max_moves: Moves without progress in between, those apart for which no worker was at fault.
        stall_s: Silence about a request that has begun to generate.
        prefill_stall_s: Silence about a claimed request before its first token.
        ack_timeout_s: Wait for the queue's acknowledgement.
        refused_retry_s: Wait until what the queue has refused is published again.
        claim_timeout_s: Wait for a claim while a worker has room and the queue looks empty; doubles each time.
        disturbed_claim_timeout_s: The same while a worker is silent or has just died; doubles up to `claim_timeout_s`.
        after_death_claim_timeout_s: The same for a request that was published before a worker died and may have been
            delivered to it; doubles too.
        delivered_claim_timeout_s: Wait for a claim of a request that was delivered to some worker; doubles each time.
        suspect_claim_timeout_s: Wait for a claim of a suspect, which may have to wait for others; doubles each time.
        tokens_per_timeout_s: Each so many prompt tokens lengthen these timeouts by a second: tokenizing takes time too.
        reconnect_timeout_s: Silence about a generating request after NATS came back: its last frames may be lost.
        reconnect_prefill_timeout_s: The same for a claimed request before its first token.
        reconnect_prefill_rate: Each so many prompt tokens lengthen that by a second.
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
