"""What a client says of the conversation that a request belongs to: how long its computed prefix is of use.

Hints change which blocks of the KV cache are evicted first, never an answer. A worker that does not know them ignores
them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_RETAIN_S = 86_400.0
MAX_SESSION_CHARACTERS = 256

RetainSeconds = Annotated[float, Meta(ge=0.0, le=MAX_RETAIN_S)]
SessionId = Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARACTERS)]


class CacheHints(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hints of one request.

    Attributes:
        session_id: Names the conversation within its tenant.
        retain_s: Once the request has ended, its blocks are evicted after all others for this many seconds.
        supersedes: The request holds the conversation's whole state: earlier blocks of it are evicted first.
        drop: The conversation ends with this request: its blocks are evicted first.
    """

    session_id: SessionId | None = None
    retain_s: RetainSeconds = 0.0
    supersedes: bool = False
    drop: bool = False
