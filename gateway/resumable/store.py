"""Reads and writes single messages of the JetStream stream of logs.

Hundreds of streams are read at once when their gateway has died. A request of the library costs a queue, a task, and a
parser of e-mail headers; here all answers come to one direct subscription, and are decoded in one pass.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionReconnectingError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

from shared.direct_client import DirectClient
from shared.nats_connection import unsubscribe
from shared.publication import EXPECTED_SEQUENCE, WRONG_LAST_SEQUENCE, PublishError, decode_ack
from shared.streams import STREAMS_STREAM

_GET = f"$JS.API.STREAM.MSG.GET.{STREAMS_STREAM}"
_TIMEOUT_S = 3.0
_NOT_FOUND = 404


class StoredMessage(Struct):
    """A message of the stream: its number, its content, and its headers as NATS keeps them."""

    seq: int
    data: bytes = b""
    hdrs: bytes = b""

    def header(self, name: str, default: str) -> str:
        """Return the value of a header."""
        start = f"{name}: "
        lines = self.hdrs.decode().split("\r\n")
        return next((line.removeprefix(start) for line in lines if line.startswith(start)), default)


class _Answer(Struct):
    message: StoredMessage | None = None
    error: PublishError | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class MessageStore:
    """Requests to JetStream over one inbox.

    Methods raise one of the log's `ERRORS` where NATS does not answer, as soon as the connection is lost.
    """

    def __init__(self, nats: DirectClient) -> None:
        self._nats = nats
        self._inbox = nats.new_inbox()
        self._numbers = itertools.count()
        # Requests under way, in the order in which they time out, each with the loop time at which it does.
        self._answers: dict[str, tuple[asyncio.Future[bytes], float]] = {}
        # One timer, that of the first of them: one for each request would cost as much as the request.
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._subscription: Subscription | None = None
        self._is_starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen for answers."""
        async with self._is_starting:
            if self._subscription is None:
                self._subscription = await self._nats.subscribe_direct(self._inbox + ".*", self._receive)
                self._nats.lost_callbacks.add(self._fail_all)

    async def close(self) -> None:
        """Hear of nothing more."""
        self._nats.lost_callbacks.discard(self._fail_all)
        subscription, self._subscription = self._subscription, None
        await unsubscribe(subscription)

    def send(self, subject: str, payload: bytes) -> None:
        """Write a message without waiting; the next one that is acknowledged says that it is stored, too."""
        self._nats.send(subject, payload)

    def write(self, subject: str, payload: bytes, seq: int, headers: str = "") -> Awaitable[int | None]:
        """Store a message if the last one of its subject is `seq`, 0 for none. `start` must have been awaited.

        Args:
            subject: Where it belongs.
            payload: Its content.
            seq: Number of the last message.
            headers: Lines that end with CR LF each.

        Returns:
            Gives the message's number, or None if the last one is another. Everything that this connection has sent
            before is stored when it gives a number.
        """
        sent = self._request(subject, payload, f"{EXPECTED_SEQUENCE}: {seq}\r\n{headers}".encode())
        return self._written(sent)

    async def last(self, subject: str) -> StoredMessage | None:
        """Return the last message of a subject, None if there is none. The stream's leader answers."""
        await self.start()
        content = await self._request(_GET, msgspec.json.encode({"last_by_subj": subject}))
        if not content:
            raise ServiceUnavailableError
        answer = _decode_answer(content)
        if answer.error is not None and answer.error.code != _NOT_FOUND:
            raise _api_error(answer.error)
        return answer.message

    async def _written(self, sent: Awaitable[bytes]) -> int | None:
        content = await sent
        if not content:
            # NATS answers with an empty message when no stream listens on the subject.
            raise NoStreamResponseError
        answer = decode_ack(content)
        if answer.error is not None and answer.error.err_code != WRONG_LAST_SEQUENCE:
            raise _api_error(answer.error)
        return answer.seq if answer.error is None else None

    def _request(self, subject: str, payload: bytes, headers: bytes = b"") -> asyncio.Future[bytes]:
        if not self._nats.is_connected:
            raise ConnectionReconnectingError
        reply = f"{self._inbox}.{next(self._numbers)}"
        self._nats.send(subject, payload, reply, headers)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        due_at = self._loop.time() + _TIMEOUT_S
        self._answers[reply] = (answer, due_at)
        if self._timer is None:
            self._timer = self._loop.call_at(due_at, self._time_out)
        return answer

    def _time_out(self) -> None:
        self._timer, now = None, self._loop.time()
        while self._answers:
            reply, (answer, due_at) = next(iter(self._answers.items()))
            if due_at > now:
                self._timer = self._loop.call_at(due_at, self._time_out)
                return
            del self._answers[reply]
            if not answer.done():
                answer.set_exception(NatsTimeoutError())

    def _fail_all(self) -> None:
        answers, self._answers = self._answers, {}
        for answer, _ in answers.values():
            if not answer.done():
                answer.set_exception(ConnectionReconnectingError())

    def _receive(self, message: Msg) -> None:
        answer, _ = self._answers.pop(message.subject, (None, 0.0))
        if answer is not None and not answer.done():
            answer.set_result(message.data)


def _api_error(error: PublishError) -> APIError:
    return APIError(code=error.code, err_code=error.err_code, description=error.description)
