"""Who asks for admission, as far as it matters for a promise made earlier: clients come back without our help.

No client library sends a token of ours back by itself, but every one repeats the same body under the same key. So a
refused request is recognised by its key and the hash of its body, or by the ticket that its refusal carried, for
clients that send it. OpenAI's libraries also say how often they have tried already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property

from gateway.aliases.book import ArmProbe

TICKET_HEADER = b"x-headrace-ticket"
_ATTEMPT_HEADER = b"x-stainless-retry-count"
_MAX_TICKET_BYTES = 64


class Caller:
    """One request's sender.

    Attributes:
        traceparent: Names its span, when requests are traced.
        weight: Of its key.
        request_key: Ids of its sequences begin with it; None for any.
        probe: Measures it for a canary.
        ticket: The ticket that it shows, or None.
        is_retry: Whether it says that it was sent before; None when it does not say.
    """

    def __init__(
        self,
        key_id: str,
        tenant: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
        request_id: str = "",
        traceparent: str | None = None,
        weight: float = 1.0,
        request_key: str | None = None,
        probe: ArmProbe | None = None,
    ) -> None:
        self.key_id = key_id
        self.tenant = tenant
        self.request_id = request_id
        self.traceparent = traceparent
        self.weight = weight
        self.request_key = request_key
        self.probe = probe
        self.ticket: str | None = None
        self.is_retry: bool | None = None
        self.body = body
        for name, value in headers:
            if name == TICKET_HEADER and len(value) <= _MAX_TICKET_BYTES:
                self.ticket = value.decode("latin-1")
            elif name == _ATTEMPT_HEADER and value.isdigit():
                self.is_retry = value.strip(b"0") != b""

    @cached_property
    def identity(self) -> bytes:
        """A hash that is the same when the same key sends the same body again."""
        return hashlib.blake2b(self.body, digest_size=16, key=hashlib.sha256(self.key_id.encode()).digest()).digest()
