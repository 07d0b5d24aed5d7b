"""An exchange whose transport keeps what is written."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from gateway.http1.body import BodyBudget, RequestBody
from gateway.http1.exchange import Exchange, Headers
from gateway.http1.head import parse_head


class KeepingTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    @property
    def sent(self) -> bytes:
        return b"".join(self.writes)

    def body(self) -> Any:
        """Return the JSON of a whole answer."""
        return json.loads(self.sent.partition(b"\r\n\r\n")[2])


class Channel:
    """What a connection would be to the exchange."""

    default_headers: Headers = ()
    must_close = False

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.num_answers = 0

    def answered(self, *, close: bool) -> None:
        self.num_answers += 1
        if close:
            self.transport.close()


def kept_exchange() -> tuple[Exchange, Channel, KeepingTransport]:
    transport = KeepingTransport()
    channel = Channel(transport)
    head = parse_head(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n\r\n")
    return Exchange(channel, head, RequestBody(lambda: None, BodyBudget(1 << 20, 1))), channel, transport
