"""The record of what a batch request has so far: written and continued by workers, read by gateways."""

from __future__ import annotations

from msgspec import Struct

from shared.kv_budget import EvictedBlocks


class BatchProgress(Struct, frozen=True, array_like=True, tag="batch_progress"):
    """The record of one request.

    Attributes:
        digest: SHA-256 of the request as published.
        stream_seq: Number of its message.
        revision: Of the model that made the tokens.
        num_delivered: Deliveries that are not failed attempts.
        token_ids: Generated so far.
        text: Text of `token_ids`, as far as it is certain.
        in_reasoning: As in `Delta`.
        total_logprob: Sum of the log probabilities of `token_ids`, if they are asked for.
        adapter: Digest of the adapter that made them, whatever its name means by now.
        evicted: Blocks evicted by attention before the last token.
    """

    digest: bytes
    stream_seq: int
    revision: str
    num_delivered: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    in_reasoning: bool = False
    total_logprob: float = 0.0
    adapter: str | None = None
    evicted: EvictedBlocks | None = None
