"""Calls between processes, over NATS request and reply.

Answers have inboxes apart from those of NATS itself, below `_INBOX_<role>.answers`: logins that answer calls may
publish there and to no other inbox. NATS's own way, `allow_responses`, lets a login publish to any subject at all: it
sends itself a message with the subject as its reply. Since many may publish to the inboxes, tokens are unguessable.

A connection has one subscription for the answers to all its calls: NATS closes a connection with too many for good.
"""

from __future__ import annotations

import asyncio
import secrets
from weakref import WeakKeyDictionary

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

_NO_RESPONDERS = "503"


def answer_inbox(client: Client) -> str:
    """Return a new inbox for answers to calls; it has room for one token more."""
    prefix = client.new_inbox().rpartition(".")[0]
    return f"{prefix}.answers.{secrets.token_hex(16)}"


def is_no_responders(message: Msg) -> bool:
    """Whether a message is NATS's report that a call's subject has no subscriber."""
    return bool(message.headers) and message.headers.get("Status") == _NO_RESPONDERS  # type: ignore[union-attr]


async def call_process(client: Client, subject: str, payload: bytes, timeout_s: float) -> Msg:
    """Return the answer to a call; `NoRespondersError` without a subscriber, `NatsTimeoutError` after `timeout_s`."""
    answers = _answers.get(client)
    if answers is None:
        answers = _answers[client] = _Answers(client)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await answers.call(client, subject, payload)
    except TimeoutError:
        raise NatsTimeoutError from None
    if is_no_responders(answer):
        raise NoRespondersError
    return answer


class _Answers:
    """The unanswered calls of one connection. Holds no reference to the connection."""

    def __init__(self, client: Client) -> None:
        self._inbox = answer_inbox(client)
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._subscribing: asyncio.Task[None] | None = None
        self._is_subscribed = False

    async def call(self, client: Client, subject: str, payload: bytes) -> Msg:
        """Return the answer to a call, or NATS's report instead; a cancelled call leaves nothing behind."""
        if not self._is_subscribed:
            if self._subscribing is None:
                self._subscribing = asyncio.create_task(self._subscribe(client))
            # The first caller may be cancelled, and the others wait for the task too.
            await asyncio.shield(self._subscribing)
        # The called process learns the inbox, and must not guess where the answers to other calls go.
        reply = f"{self._inbox}.{secrets.token_hex(16)}"
        answered = self._waiting[reply] = asyncio.get_running_loop().create_future()
        try:
            await client.publish(subject, payload, reply=reply)
            answer: Msg = await answered
            return answer
        finally:
            del self._waiting[reply]

    async def _subscribe(self, client: Client) -> None:
        try:
            await client.subscribe(f"{self._inbox}.*", cb=self._receive)
            self._is_subscribed = True
        finally:
            self._subscribing = None

    async def _receive(self, message: Msg) -> None:
        answered = self._waiting.get(message.subject)
        if answered is not None and not answered.done():
            answered.set_result(message)


_answers: WeakKeyDictionary[Client, _Answers] = WeakKeyDictionary()
