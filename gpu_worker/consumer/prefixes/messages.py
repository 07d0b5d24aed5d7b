"""What workers of a model say to one another about a request that one has pulled and another holds the prefix of.

The worker that has pulled the request is the only one that decides: it offers, others answer, and it grants to one of
them, or begins itself. So a request is never claimed twice, and a message that is lost costs the hit alone.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from shared.bounds import Counter, NumBlocks, NumRequests, NumTokens, PeerName
from shared.prefixes import LINK_BYTES, MAX_WAIT_S

MAX_OFFERED_LINKS = 64

Reply = Literal["claim", "later", "decline", "taken"]
WaitSeconds = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]


class Offer(Struct, frozen=True, array_like=True, tag="offer"):
    """A request waits here for whoever holds its prefix.

    Attributes:
        number: The offering worker's name for it.
        links: Of its chain, from the last one that the addressee has announced. None where no prefix is asked for, but
            more memory that nothing is cached in.
        num_tokens: About its length.
        num_held: Tokens of it that are cached here.
        backlog: Prompt tokens to be computed here before it.
        num_blank: Blocks here that nothing is cached in.
        expires_s: For how long it waits.
    """

    worker: PeerName
    number: Counter
    links: Annotated[tuple[Annotated[bytes, Meta(max_length=LINK_BYTES)], ...], Meta(max_length=MAX_OFFERED_LINKS)]
    num_tokens: NumTokens
    num_held: NumTokens
    backlog: NumTokens
    num_requests: NumRequests
    num_blank: NumBlocks
    expires_s: WaitSeconds


class Answer(Struct, frozen=True, array_like=True, tag="answer"):
    """`claim`: there is room now. `later`: not yet. `decline`: not here. `taken`: a granted request has arrived."""

    worker: PeerName
    number: Counter
    reply: Reply


class Grant(Struct, frozen=True, array_like=True, tag="grant"):
    """The request itself, as it was pulled: whoever gets it acknowledges it to the queue."""

    worker: PeerName
    number: Counter
    subject: Annotated[str, Meta(max_length=512)]
    data: bytes
    ack_subject: Annotated[str, Meta(max_length=1024)]


PeerMessage = Offer | Answer | Grant

decode_peer_message = msgspec.msgpack.Decoder(PeerMessage).decode
