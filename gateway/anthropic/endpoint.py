"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.auth import Principal
from gateway.anthropic.body import CountTokensBody, MessagesBody
from gateway.anthropic.dialect import ANTHROPIC, AnthropicError
from gateway.anthropic.message import AnthropicEvent, AnthropicMessage, StreamedMessage, WholeMessage
from gateway.anthropic.parsing import parse_count_tokens, parse_messages
from gateway.api.answer import Answer, Asked, StreamParts
from gateway.api.endpoint import Endpoint
from gateway.api.operation import Operation
from gateway.api.routes import KeyRoute, RouteServices, json_response


class TokenCount(Struct, forbid_unknown_fields=True):
    """The tokens of a prompt."""

    input_tokens: int


class MessagesEndpoint(Endpoint):
    """Creates messages."""

    path = "/v1/messages"
    name = "messages"
    dialect = ANTHROPIC
    is_logged = True
    parse = staticmethod(parse_messages)

    def whole_answer(self, asked: Asked) -> Answer:
        """Return an answer as one message."""
        return WholeMessage(asked)

    def streamed_answer(self, asked: Asked, parts: StreamParts) -> Answer:
        """Return an answer as the events of one message."""
        return StreamedMessage(asked, parts)


def count_tokens_route(services: RouteServices) -> KeyRoute:
    """Return the route that counts the tokens of a prompt."""

    async def count(request: Request, principal: Principal) -> Response:
        model, call, images = await services.read_body(request, principal, parse_count_tokens)
        reply = await services.ask_tokenizer(principal, model, call, images)
        return json_response(TokenCount(len(reply.token_ids)))

    return KeyRoute("POST", "/v1/messages/count_tokens", count, ANTHROPIC)


OPERATIONS = (
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, in Anthropic's form.",
        AnthropicMessage,
        MessagesBody,
        AnthropicEvent,
        AnthropicError,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        TokenCount,
        CountTokensBody,
        error=AnthropicError,
    ),
)
