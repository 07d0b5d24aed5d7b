"""HTTP that no honest client would send: requests with broken contents, many to a connection, and broken connections.

A request with a whole head and a length has an answer, whatever its content is; what breaks the framing may end its
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter

from ops.chaos.malformed import mutated
from ops.chaos.system import API_KEY, MODEL

POSTED = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
FETCHED = ("/v1/models/", "/v1/models", "/health/live", "/health/ready", "/metrics", "/")
_VALID = json.dumps({"model": MODEL, "prompt": "x", "messages": [], "max_tokens": 1}).encode()
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_TIMEOUT_S = 20.0
# Without the bytes that end a request line, and without a fragment, which ends the connection.
_TARGET_BYTES = bytes(set(range(0x21, 0x7F)) - {ord("#")})


def broken_request(chance: random.Random) -> bytes:
    """Return one request with a whole head and a broken target or body; a kept connection can carry many."""
    if chance.random() < 0.2:
        target = chance.choice(FETCHED).encode() + bytes(chance.choices(_TARGET_BYTES, k=chance.randrange(30)))
        return b"GET %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n\r\n" % (target, API_KEY.encode())
    body = mutated(_VALID, chance)
    if _is_json(body):
        body = _VALID[: chance.randrange(1, len(_VALID))]
    head = [
        f"POST {chance.choice(POSTED)} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {API_KEY}",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


async def send_broken_requests(port: int, number: int, chance: random.Random) -> Counter[int]:
    """Send so many broken requests over one connection without waiting, and count the statuses of the answers."""
    payload = b"".join(broken_request(chance) for _ in range(number))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    statuses: Counter[int] = Counter()
    try:
        writer.write(payload)
        received = b""
        async with asyncio.timeout(_TIMEOUT_S):
            while statuses.total() < number and (data := await reader.read(1 << 16)):
                received += data
                found = list(_STATUS.finditer(received))
                statuses.update(int(match[1]) for match in found)
                # The rest may hold the beginning of a status line.
                received = received[found[-1].end() :] if found else received[-16:]
    except (OSError, TimeoutError):
        return statuses
    finally:
        writer.transport.abort()
    return statuses


async def send_broken_framing(port: int, chance: random.Random) -> None:
    """Open a connection, send what is no HTTP, and wait until the gateway has closed it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(mutated(broken_request(chance), chance))
        writer.write_eof()
        await asyncio.wait_for(reader.read(), _TIMEOUT_S)
    writer.transport.abort()


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True
