"""The floor under every gateway: an asyncio server that only writes the event stream's bytes, at the engine's pace.

Run as `python -m ops.bench.floor_server STEP_MS NUM_TOKENS`; it prints its port. No JSON, no queue, no routing:
what it costs per token is the socket write and the event loop.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

from ops.load_generator.rounds import stamp

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_PREFIX = (
    b'data: {"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1700000000,'
    b'"model":"headrace-demo","choices":[{"index":0,"text":'
)
_SUFFIX = b',"logprobs":null,"finish_reason":null}]}\n\n'


class _Paced(asyncio.Protocol):
    _transport: asyncio.Transport

    def __init__(self, running: dict[asyncio.Transport, int]) -> None:
        self._running = running

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(_HEAD + _stamped())
        self._running[self._transport] = 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._running.pop(self._transport, None)


def _stamped() -> bytes:
    event = b'%b"%b"%b' % (_PREFIX, stamp().encode(), _SUFFIX)
    return b"%x\r\n%b\r\n" % (len(event), event)


async def serve(step_s: float, num_tokens: int) -> None:
    """Serve until killed."""
    running: dict[asyncio.Transport, int] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Paced(running), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    due = loop.time()
    while True:
        due += step_s
        await asyncio.sleep(max(0.0, due - loop.time()))
        chunk = _stamped()
        for transport, count in list(running.items()):
            if count + 1 < num_tokens:
                running[transport] = count + 1
                transport.write(chunk)
            else:
                del running[transport]
                transport.write(chunk + _END)


if __name__ == "__main__":
    uvloop.run(serve(float(sys.argv[1]) / 1000, int(sys.argv[2])))
