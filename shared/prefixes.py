"""What a heartbeat says of prefixes: the bounds that workers and gateways share."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from shared.bounds import Counter, NumBlocks

LINK_BYTES = 8
"""Of a digest: it decides where a request is computed, never what it is answered with."""
MAX_ANNOUNCED = 1024
"""Links that a worker announces at once."""
MAX_WAITING = 256
"""Requests that wait in one worker for the holder of their prefix."""
MAX_WAIT_S = 5.0
"""The longest wait for the holder of a prefix, by NATS's clock from the moment at which the request was stored."""

Links = Annotated[bytes, Meta(max_length=LINK_BYTES * MAX_ANNOUNCED)]


class PrefixNews(Struct, frozen=True, array_like=True):
    """The part of a worker's heartbeat that is about prefixes.

    Attributes:
        links: Of the chains of prompts whose beginnings it holds, one behind the other; None: those of before.
        new_links: To be added to those.
        waiting: Stream sequences of the requests that it was sent and that wait for the holder of their prefix.
        num_handovers: Requests that it was sent and gave to the holder of their prefix.
        num_in_vain: Requests that have waited for the holder of their prefix until their time was over.
        num_blank: Blocks that nothing is cached in.
    """

    links: Links | None = None
    new_links: Links = b""
    waiting: Annotated[tuple[Counter, ...], Meta(max_length=MAX_WAITING)] = ()
    num_handovers: Counter = 0
    num_in_vain: Counter = 0
    num_blank: NumBlocks = 0
