"""An endpoint that generates: how a body becomes a `Generation`, and how deltas become its answer.

Everything in between is the same for all endpoints and stands in `GenerationService`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from msgspec import Struct

from gateway.admission.auth import Principal
from gateway.admission.caller import Caller
from gateway.api.answer import Answer, Asked, StreamParts
from gateway.api.chat_answers import AnswerIdentity
from gateway.api.generation_starter import GenerationStarter, Membership
from gateway.api.large_bodies import LargeBodies
from gateway.api.schemas.known_names import STRICT, BodyRules
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.api.streamed import StreamedAnswer
from gateway.api.whole import WholeAnswer
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation
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
    """One route. It keeps nothing of a request.

    Attributes:
        path: Of the route, without a host.
        name: Of the route in metrics.
        dialect: How it tells errors and ends streams.
        parse: Makes a generation of a body by the rules of `BodyReader.read`; raises `ApiError`.
        is_logged: The answer follows from the generation and its deltas alone, so it can be told again from a log.
    """

    path: str
    name: str
    parse: Callable[[bytes, BodyRules], Generation]
    dialect: Dialect = OPENAI
    is_logged: bool = False

    def __init__(self, bodies: LargeBodies) -> None:
        self._bodies = bodies

    async def generation(self, body: bytes, principal: Principal, rules: BodyRules = STRICT) -> Generation:
        """Return what a body asks for; `rules` as in `BodyReader.read`.

        Raises:
            ApiError: It is refused.
        """
        return await self._bodies.read(principal.tenant, len(body), partial(self.parse, body, rules))

    @abstractmethod
    def whole_answer(self, asked: Asked) -> Answer:
        """Return an answer that will be sent as one JSON body."""

    @abstractmethod
    def streamed_answer(self, asked: Asked, parts: StreamParts) -> Answer:
        """Return an answer that will be sent as an event stream."""

    async def start(self, starter: GenerationStarter, asked: GenerationStart) -> Membership:
        """Let the generation begin, whose deltas go to the answer's sinks; see `GenerationStarter.start`.

        Raises:
            ApiError: It was not admitted, or cannot be queued.
        """
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
