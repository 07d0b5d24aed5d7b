"""Whether a server of ours answers a question over its port: any answer, even a refusal, proves that it runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A port on loopback and what to ask there; without a question the server speaks first."""

    port: int
    question: bytes = b""


# A NATS server greets every connection; Redis answers without a password too, with an error.
NATS_QUESTION = b""
REDIS_QUESTION = b"PING\r\n"


def gateway_question(operator_key: str) -> bytes:
    """Return the question to ask at a gateway's operator port."""
    head = f"GET /health/live HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {operator_key}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n"


async def answers(check: HealthCheck, timeout_s: float) -> bool:
    """Ask on a new connection, and tell whether anything comes back in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", check.port)
            try:
                writer.write(check.question)
                return bool(await reader.read(1))
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return False
