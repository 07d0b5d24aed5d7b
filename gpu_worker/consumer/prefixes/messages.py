"""What workers of a model say to one another about a request that one has pulled and another holds the prefix of.

The worker that has pulled the request is the only one that decides: it offers, others answer, and it grants to one of
them, or begins itself. So a request is never claimed twice, and a message that is lost costs the hit alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta, Struct

from gpu_worker.engine.engine import EngineStats
from shared.adapter_calls import Digest
from shared.bounds import Counter, NumBlocks, NumRequests, NumTokens, PeerName
from shared.prefixes import LINK_BYTES, MAX_WAIT_S

MAX_OFFERED_LINKS = 64

Reply = Literal["claim", "later", "decline", "taken"]
WaitSeconds = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]
# Written as it is into the command that acknowledges: white space would begin another command, under this login.
AckSubject = Annotated[str, Meta(max_length=1024, pattern=r"^\$JS\.ACK\.[^\s*>]+\Z")]


class Offer(Struct, frozen=True, array_like=True, tag="offer"):
    """A request waits here for a worker that holds its prefix.

    Attributes:
        number: The offering worker's name for it.
        links: Of its chain, from the last one that the addressee has announced. None where no prefix is asked for, but
            more memory that nothing is cached in.
        num_tokens: Its approximate length.
        num_held: Tokens of it that are cached here.
        backlog: Prompt tokens to be computed here before it.
        num_blank: Blocks here that nothing is cached in.
        expires_s: For how long it waits.
        adapter: The digest of the request's adapter, if the addressee lists it; `links` may be empty then, too.
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
    adapter: Digest | None = None


class Answer(Struct, frozen=True, array_like=True, tag="answer"):
    """`claim`: there is room now. `later`: not yet. `decline`: not here. `taken`: a granted request has arrived."""

    worker: PeerName
    number: Counter
    reply: Reply


class Grant(Struct, frozen=True, array_like=True, tag="grant"):
    """The request itself, as it was pulled: its receiver acknowledges it to the queue."""

    worker: PeerName
    number: Counter
    subject: Annotated[str, Meta(max_length=512)]
    data: bytes
    ack_subject: AckSubject


PeerMessage = Offer | Answer | Grant

decode_peer_message = msgspec.msgpack.Decoder(PeerMessage).decode


class EngineState(Protocol):
    """The engine, as far as it can be looked at from the event loop."""

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot."""

    @property
    def num_blank_blocks(self) -> int:
        """Blocks that hold nothing."""

    def is_cached(self, digest: bytes) -> bool:
        """Return whether the prefix cache has a block of this digest."""


class AdapterState(Protocol):
    """The adapters of this worker."""

    @property
    def load_s(self) -> float:
        """About how long it takes to load one, in seconds; 0 where that is not known."""

    def is_resident(self, digest: str) -> bool:
        """Return whether requests can use an adapter at once."""


class Timer(Protocol):
    """Something that will be called."""

    def cancel(self) -> None:
        """Do not call it."""


class Peers(Protocol):
    """The other workers of the model, and the time."""

    @property
    def worker(self) -> str:
        """This worker's own name among them."""

    def send(self, worker: str, message: PeerMessage) -> bool:
        """Send a message, which may get lost; return whether it can be sent at all."""

    def time(self) -> float:
        """Return monotonic seconds."""

    def age_s(self, stored_at: float) -> float:
        """Return for how long a request has been in the queue, which says when it has stored it."""

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Call something after `delay` seconds."""
