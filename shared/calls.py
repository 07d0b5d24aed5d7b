"""Calls between processes, over NATS request and reply.

Answers have inboxes apart from those of NATS itself, below `_INBOX_<role>.answers`: whoever answers calls may publish
there and nowhere else among the inboxes. NATS's own way, `allow_responses`, lets a login publish to any subject at all:
it sends itself a message that names the subject for its reply. As many may publish there, tokens cannot be guessed.
"""

from __future__ import annotations

import asyncio
import secrets

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from shared.nats_connection import unsubscribe

_NO_RESPONDERS = "503"


def answer_inbox(client: Client) -> str:
    """Return a new inbox for answers to calls; it has room for one token more."""
    prefix = client.new_inbox().rpartition(".")[0]
    return f"{prefix}.answers.{secrets.token_hex(16)}"


def is_no_responders(message: Msg) -> bool:
    """Whether NATS says, instead of an answer, that nobody listens to the subject of a call."""
    return bool(message.headers) and message.headers.get("Status") == _NO_RESPONDERS  # type: ignore[union-attr]


async def call_process(client: Client, subject: str, payload: bytes, timeout_s: float) -> Msg:
    """Publish a call and return its answer.

    Raises:
        NoRespondersError: Nobody listens.
        NatsTimeoutError: No answer within `timeout_s`.
    """
    inbox = answer_inbox(client)
    answered: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

    async def receive(message: Msg) -> None:
        if not answered.done():
            answered.set_result(message)

    subscription = await client.subscribe(inbox, cb=receive)
    try:
        await client.publish(subject, payload, reply=inbox)
        async with asyncio.timeout(timeout_s):
            answer = await answered
    except TimeoutError:
        raise NatsTimeoutError from None
    finally:
        await unsubscribe(subscription)
    if is_no_responders(answer):
        raise NoRespondersError
    return answer
