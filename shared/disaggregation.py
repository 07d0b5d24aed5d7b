"""What workers with roles say: which queues they take from, where their KV is fetched, and where that of a request is.

A prefill worker computes prompts and first tokens. Then the gateway publishes the request again with `KvReady`, and a
worker that decodes fetches the KV from the one that it names. Bytes never pass NATS.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.bounds import Counter, Epoch, NumTokens, PeerName, RequestId

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


def as_role(name: str | None) -> Role | None:
    """Return the role with this name; None if there is no such role."""
    return next((role for role in ROLES if role == name), None)


TakenQueue = Literal["interactive", "resumed", "ready"]
PROMPT_QUEUES: tuple[TakenQueue, ...] = ("interactive", "resumed")
"""Of requests whose prompts are to be computed, by the worker that takes them or by one that may fetch their KV."""

LeaseToken = Annotated[str, Meta(max_length=32, pattern=r"^([0-9a-f]{32})?\Z")]
Address = Annotated[str, Meta(max_length=300)]


class KvReady(Struct, frozen=True):
    """Where the KV of a request's prompt is. It holds for the attempt that follows `epoch`, and for no other.

    Attributes:
        request, epoch: The attempt that has computed it.
        worker: Who keeps it; its heartbeat says at which address.
        lease: Secret that lets it be read, once, until it is over; empty where computing the prompt again costs less.
        cached_tokens: Prompt tokens that the worker had found in its cache: the request's usage counts no others.
    """

    request: RequestId
    epoch: Epoch
    worker: PeerName
    lease: LeaseToken = ""
    cached_tokens: NumTokens = 0


class RoleNews(Struct, frozen=True, array_like=True):
    """The part of the heartbeat of a worker with a role.

    Attributes:
        takes: The queues of interactive requests that it pulls from at present.
        address: Where its KV is fetched, `host:port`.
        maker: Digest of its weights, layouts and arithmetic, while it is known: only equal ones can use its KV.
        last_ready, last_ready_returned: `Heartbeat.last_pulled` and `last_returned` of the queue `ready`.
        num_handed_over: Requests that it has handed over with KV.
    """

    role: Role = "both"
    takes: Annotated[tuple[TakenQueue, ...], Meta(max_length=3)] = PROMPT_QUEUES
    address: Address = ""
    maker: Annotated[str, Meta(max_length=64)] = ""
    last_ready: Counter = 0
    last_ready_returned: Counter = 0
    num_handed_over: Counter = 0
