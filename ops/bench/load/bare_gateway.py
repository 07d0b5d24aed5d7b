"""The floor under every gateway in Python that stands before a queue: the hops of ours, and nothing else.

Run as `python -m ops.bench.load.bare_gateway NATS_URL`; it prints its port. A body of JSON is decoded, a request goes
to the workers' queue and its acknowledgement comes back, frames are decoded, and each token is framed and written as it
comes. Nothing is asked of a key, checked, counted, remembered, kept in order or ever given up, and the connection to
NATS is bytes: what it costs beside the server that only writes (`floor_server`) is Python, uvloop and msgspec alone.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from ops.bench.load.floor_server import END, HEAD, Connection, event_chunk
from ops.bench.load.processes import HOST
from shared.messages import Frame, Request, encode
from shared.sampling import Sampling
from shared.subjects import frame_subject, request_subject

_REPLY = frame_subject("bare")
_MESSAGE = re.compile(rb"MSG (\S+) \S+ (?:\S+ )?(\d+)\r\n")


class _Body(msgspec.Struct):
    model: str
    prompt: str
    max_tokens: int


class _Queue(asyncio.Protocol):
    """The connection to NATS: requests out, frames in."""

    def __init__(self) -> None:
        self.streams: dict[str, asyncio.Transport] = {}
        self._numbers = itertools.count()
        self._received = b""
        self._decode = msgspec.msgpack.Decoder(Frame).decode
        self._encode_text = msgspec.json.Encoder().encode
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        lines = b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB %b 1\r\nSUB bare.ack.* 2\r\nPING\r\n'
        self._transport.write(lines % _REPLY.encode())

    def publish(self, body: _Body, stream: asyncio.Transport) -> None:
        number = next(self._numbers)
        request_id = str(number)
        self.streams[request_id] = stream
        sampling = Sampling(max_tokens=body.max_tokens)
        payload = encode(Request(id=request_id, model=body.model, text=body.prompt, sampling=sampling, reply=_REPLY))
        subject = request_subject(body.model, "interactive", "default").encode()
        self._transport.write(b"PUB %b bare.ack.%d %d\r\n%b\r\n" % (subject, number, len(payload), payload))

    def data_received(self, data: bytes) -> None:
        data = self._received + data
        position = 0
        while position < len(data):
            match = _MESSAGE.match(data, position)
            if match is None:
                end = data.find(b"\r\n", position)
                if end < 0:
                    break
                if data.startswith(b"PING", position):
                    self._transport.write(b"PONG\r\n")
                position = end + 2
                continue
            end = match.end() + int(match[2])
            if end + 2 > len(data):
                break
            if match[1] == _REPLY.encode():
                self._write_tokens(self._decode(data[match.end() : end]))
            position = end + 2
        self._received = data[position:]

    def _write_tokens(self, frame: Frame) -> None:
        for delta in frame.deltas:
            stream = self.streams[delta.id]
            chunk = event_chunk(self._encode_text(delta.text))
            if delta.seq == 0:
                chunk = HEAD + chunk
            if delta.finish is not None:
                chunk += END
                del self.streams[delta.id]
            stream.write(chunk)


class _Client(Connection):
    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        self._decode = msgspec.json.Decoder(_Body).decode

    def data_received(self, data: bytes) -> None:
        self._queue.publish(self._decode(data[data.index(b"\r\n\r\n") + 4 :]), self._transport)


async def serve(nats_url: str) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    address = urlsplit(nats_url)
    _, queue = await loop.create_connection(_Queue, str(address.hostname), address.port or 4222)
    server = await loop.create_server(lambda: _Client(queue), HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
