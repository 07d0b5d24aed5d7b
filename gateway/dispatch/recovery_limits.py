"""For how long requests wait, and how often they are moved, before something is done about them."""

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
        claim_patience_s: Wait for a claim while a worker has room and the queue looks empty; doubles each time.
        disturbed_patience_s: The same while a worker is silent or has just died; doubles up to `claim_patience_s`.
        bereaved_patience_s: The same for what was published before a worker died, which may have been sent it; doubles
            too.
        delivered_patience_s: Wait for a claim of what some worker is known to have been sent; doubles each time.
        suspect_patience_s: Wait for a claim of a suspect, which may have to wait for others; doubles each time.
        tokens_per_patience_s: Prompt tokens that lengthen this patience by a second: tokenizing takes time too.
        reconnect_patience_s: Silence about a generating request after NATS came back: its last frames may be lost.
        reconnect_prefill_patience_s: The same for a claimed request before its first token, and
        reconnect_prefill_rate: prompt tokens that lengthen this by a second.
        held_back_s: Absence of NATS after which new requests are refused. A connection that was cut, or was lost in a
            pause of this process, is back sooner.
        outage_patience_s: Absence of NATS after which all requests are failed, and of its stream or the leader of this
            after which those are that have not begun.
    """

    max_moves: int = 16
    stall_s: float = 10.0
    prefill_stall_s: float = 60.0
    ack_timeout_s: float = 3.0
    refused_retry_s: float = 0.5
    claim_patience_s: float = 1.0
    disturbed_patience_s: float = 0.5
    bereaved_patience_s: float = 0.15
    delivered_patience_s: float = 2.5
    suspect_patience_s: float = 5.0
    tokens_per_patience_s: float = 10_000.0
    reconnect_patience_s: float = 0.8
    reconnect_prefill_patience_s: float = 1.0
    reconnect_prefill_rate: float = 1000.0
    held_back_s: float = 0.5
    outage_patience_s: float = 15.0
