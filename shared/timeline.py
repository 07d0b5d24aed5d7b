"""A request's life as its gateway saw it, with its workers' reports: gateways store it, and send it to each other.

All times are seconds since the request came, by the gateway's clock. A worker's own times are placed so that its last
one is that at which its last delta came, because the clocks of two machines differ.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.receipt import Receipt

MAX_SEQUENCES = 16
"""Limit on a request's sequences, on attempts at each (the first are kept), and on pauses of an attempt."""
MAX_LISTED = 200

Order = Literal["recent", "slow", "first", "failed", "running"]
Asked = Literal["find", "list", "counts"]


class Attempt(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One attempt at a sequence.

    Attributes:
        epoch: Its number.
        why: Reason for it: `first`, or how the one before was lost (`worker_dead`, `handoff`, `silent`, ...).
        published_s: When it was put into the queue.
        claimed_s: When a worker claimed it; None if none did.
        ended_s: When it ended.
        end: How it ended: `stop`, `length`, `cancelled`, `failed`, or the reason for the next one.
        tokens: Number of tokens delivered.
        receipt: None if its worker sent none: it died, or is of an earlier version.
        pauses: Times in which the gateway heard nothing: when each had ended, and how long it was. The longest
            `MAX_SEQUENCES` of `num_pauses`, which lasted `paused_s` together.
    """

    epoch: int
    why: str = "first"
    published_s: float = 0.0
    claimed_s: float | None = None
    worker: str | None = None
    ended_s: float = 0.0
    end: str = ""
    tokens: int = 0
    receipt: Receipt | None = None
    pauses: tuple[tuple[float, float], ...] = ()
    num_pauses: int = 0
    paused_s: float = 0.0


class SequenceLife(Struct, frozen=True, omit_defaults=True, gc=False):
    """One sequence: a choice, or one of several prompts."""

    id: str
    attempts: list[Attempt]


class Timeline(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request.

    Attributes:
        id: Its `x-request-id`. The client may choose it, so that two requests may have the same.
        began: Unix seconds.
        outcome: `completed`, `failed`, `disconnected`, `slow_reader`, `refused`, or `running`.
        error: Code and message sent to the client.
        source: `generated` or `cache`.
        asked: Parameters of the request that are not text.
        stop: Its stop strings, where the operator has texts shown.
        not_kept: Names of further parameters, or of those that are kept in part.
        prompt: Its end, where the operator has texts shown.
        admitted_s: When it was admitted, and its sequences were handed to the queue.
        first_token_s: When the gateway had the first output.
        left_out: Sequences beyond the bound.
    """

    id: str
    gateway: str
    began: float
    route: str = ""
    model: str = ""
    tenant: str = ""
    status: int = 0
    outcome: str = "running"
    error: str | None = None
    source: str = "generated"
    asked: dict[str, int | float | str | bool] = {}
    stop: tuple[str, ...] = ()
    not_kept: tuple[str, ...] = ()
    prompt: str | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    sequences: list[SequenceLife] = []
    left_out: int = 0

    @property
    def num_generated(self) -> int:
        """Output tokens: as usage counts them, or where none came yet or ever, as they were delivered."""
        return self.completion_tokens or sum(each.tokens for life in self.sequences for each in life.attempts)


class Summary(Struct, frozen=True, omit_defaults=True, gc=False):
    """One line of a list of requests; `code` is that of its error."""

    id: str
    tenant: str
    model: str
    route: str
    status: int
    outcome: str
    began: float
    ended_s: float
    first_token_s: float | None = None
    tokens: int = 0
    moves: int = 0
    code: str = ""


class TimelineCall(Struct, frozen=True, kw_only=True, tag="timeline"):
    """One gateway's query to another: the requests of an id, a list of requests, or its counts."""

    asked: Asked
    id: Annotated[str, Meta(max_length=256)] = ""
    order: Order = "recent"
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 50


class GatewayCounts(Struct, frozen=True, kw_only=True):
    """Counts of one gateway process since its start.

    `oldest_s` is for how long the first of its unclaimed requests has waited, by model.
    """

    gateway: str
    streams: int = 0
    completion_tokens: int = 0
    prompt_tokens: int = 0
    unclaimed: dict[str, int] = {}
    oldest_s: dict[str, float] = {}
    shed: dict[str, int] = {}
    limited: dict[str, int] = {}
    moves: dict[str, int] = {}
    sequences: dict[str, int] = {}
    cpu_s: float = 0.0


class TimelineReply(Struct, frozen=True, kw_only=True, tag="timelines"):
    """The answer; fields that were not asked for are empty."""

    found: list[Timeline] = []
    listed: list[Summary] = []
    counts: GatewayCounts | None = None
