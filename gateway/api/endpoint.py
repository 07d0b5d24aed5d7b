"""An endpoint that generates: how a body becomes a `Generation`, and how deltas become its answer.

Everything in between is the same for all endpoints and stands in `GenerationService`.

Logged generations continue without their client and can be replayed. A client asks for one with
`stream_options.resumable`, or with an `Idempotency-Key`, which lets a repeated request have the same answer.
`gateway.resumable` keeps them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import Protocol

from msgspec import Struct

from gateway.admission.auth import Principal
from gateway.admission.caller import Caller
from gateway.admission.limits import Lease
from gateway.admission.stored_reads import ReadSize
from gateway.api.answer import Answer, Asked, ResponseHead, StreamParts
from gateway.api.chat_answers import AnswerIdentity
from gateway.api.generation_starter import GenerationStarter, Membership
from gateway.api.large_bodies import LargeBodies
from gateway.api.routes import RouteServices
from gateway.api.schemas.names import STRICT, BodyRules
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.api.streamed import StreamedAnswer
from gateway.api.whole import WholeAnswer
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation
from gateway.http1.exchange import Exchange
from gateway.streams.dialect import OPENAI, Dialect


class GenerationStart(Struct, frozen=True):
    """A generation that is to begin.

    Attributes:
        generation: As its model reads it.
        load: The model's load when the generation was read.
        answer: Whose sinks get the deltas.
        caller: On whose behalf.
        is_fresh: The client wants a new generation, not a repeated answer.
    """

    generation: Generation
    load: FleetLoad
    answer: Answer
    caller: Caller
    is_fresh: bool


class Endpoint(ABC):
    """One route. It holds no state of requests.

    Attributes:
        path: Of the route, without a host.
        name: Of the route in metrics.
        dialect: Its format of errors and of the end of a stream.
        parse: Makes a generation of a body by the rules of `BodyReader.read`; raises `ApiError`.
        is_logged: The answer follows from the generation and its deltas alone, so it can be replayed from a log.
    """

    path: str
    name: str
    parse: Callable[[bytes, BodyRules], Generation]
    dialect: Dialect = OPENAI
    is_logged: bool = False

    def __init__(self, bodies: LargeBodies) -> None:
        self._bodies = bodies

    async def generation(self, body: bytes, principal: Principal, rules: BodyRules = STRICT) -> Generation:
        """Return the generation that a body requests; `rules` as in `BodyReader.read`."""
        return await self._bodies.read(principal.tenant, len(body), partial(self.parse, body, rules))

    async def fitted(
        self, generation: Generation, load: FleetLoad | None, principal: Principal, services: RouteServices
    ) -> Generation:
        """Return the generation as it fits into its model's context, before it is admitted; most stay as they are."""
        return generation

    @abstractmethod
    def whole_answer(self, asked: Asked) -> Answer:
        """Return an answer that will be sent as one JSON body."""

    @abstractmethod
    def streamed_answer(self, asked: Asked, parts: StreamParts) -> Answer:
        """Return an answer that will be sent as an event stream."""

    async def start(self, starter: GenerationStarter, asked: GenerationStart) -> Membership:
        """Let the generation begin, whose deltas go to the answer's sinks; see `GenerationStarter.start`."""
        return await starter.start(asked.generation, asked.load, asked.caller, asked.answer.sinks, asked.is_fresh)


class _OpenAiEndpoint(Endpoint):
    is_logged = True

    def whole_answer(self, asked: Asked) -> Answer:
        identity = AnswerIdentity.new(asked.generation, asked.fingerprint, asked.stamp)
        return WholeAnswer(asked, identity)

    def streamed_answer(self, asked: Asked, parts: StreamParts) -> Answer:
        identity = AnswerIdentity.new(asked.generation, asked.fingerprint, asked.stamp)
        return StreamedAnswer(asked, parts, identity)


class ChatEndpoint(_OpenAiEndpoint):
    """`POST /v1/chat/completions`."""

    path = "/v1/chat/completions"
    name = "chat"
    parse = staticmethod(parse_chat)


class CompletionEndpoint(_OpenAiEndpoint):
    """`POST /v1/completions`."""

    path = "/v1/completions"
    name = "completion"
    parse = staticmethod(parse_completion)


KEY_HEADER = b"idempotency-key"
MAX_KEY_CHARACTERS = 255


class IdempotencyKey(Struct, frozen=True):
    """Identity of repeated requests. Both digests include the endpoint.

    Attributes:
        digest: Digest of the key, 40 digits.
        request_digest: Digest of the body.
    """

    digest: str
    request_digest: str


def idempotency_key(headers: Iterable[tuple[bytes, bytes]], endpoint: str, body: bytes) -> IdempotencyKey | None:
    """Return the key of a request, or None if it has none.

    Raises:
        ApiError: 400; there are several, or it is empty, too long, or not of visible ASCII characters.
    """
    values = [value for name, value in headers if name == KEY_HEADER]
    if not values:
        return None
    value = values[0].strip()
    is_visible = all(0x21 <= byte < 0x7F for byte in value)
    if len(values) > 1 or not 1 <= len(value) <= MAX_KEY_CHARACTERS or not is_visible:
        message = f"'Idempotency-Key' must be one value of 1 to {MAX_KEY_CHARACTERS} visible ASCII characters."
        raise ApiError(400, message, param="Idempotency-Key", code="invalid_value")
    digests = (hashlib.sha256(endpoint.encode() + b"\0" + each).hexdigest() for each in (value, body))
    return IdempotencyKey(next(digests)[:40], next(digests))


class LoggedGeneration(Protocol):
    """A generation that this process can show."""

    @property
    def request_id(self) -> str:
        """Its name: the `x-request-id` of its first answer."""
        ...

    def asked(self, exchange: Exchange, head: ResponseHead, principal: Principal) -> Asked:
        """Return the parts of an answer to it."""
        ...

    def kept(self) -> AbstractContextManager[None]:
        """Keep it for a reader that has not joined yet."""
        ...

    async def read_stored(self, turn: AbstractAsyncContextManager[ReadSize]) -> None:
        """Read in a turn what only the log has, and note its size.

        Raises:
            ApiError: 429; the key has read enough for now.
        """
        ...

    async def join(self, answer: Answer) -> None:
        """Show the generation from its beginning.

        Raises:
            ApiError: It cannot be shown, or not from there.
        """
        ...


class RepeatedError(Exception):
    """A request is not begun, because its key stands for another generation."""

    def __init__(self, generation: LoggedGeneration) -> None:
        super().__init__(generation.request_id)
        self.generation = generation


class GenerationLog(Protocol):
    """Keeps logged generations."""

    def leave(self, stream: LoggedGeneration, answer: Answer) -> None:
        """Show a generation to an answer no more."""
        ...

    async def repeated(self, principal: Principal, key: IdempotencyKey) -> LoggedGeneration | None:
        """Return the generation that a key stands for, or None if it is new.

        Raises:
            ApiError: 422, it stands for another request; 503, the log does not answer.
        """
        ...

    async def start_logged(
        self, endpoint: str, asked: GenerationStart, stamped: Asked, lease: Lease, key: IdempotencyKey | None
    ) -> Membership:
        """Let a generation begin, which `asked.answer` shows; the lease is released when it has ended.

        Raises:
            ApiError: It was not admitted, or cannot be logged.
            RepeatedError: Another request with the same key was faster.
        """
        ...
