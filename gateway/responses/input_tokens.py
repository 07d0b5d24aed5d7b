"""`POST /v1/responses/input_tokens`: how many tokens the prompt of a response would have."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.auth import Principal
from gateway.api.routes import KeyRoute, RouteServices, json_response
from gateway.responses.endpoint import ResponsesEndpoint
from gateway.responses.operations import InputTokenCount
from shared.tokenizer_calls import TokenizeCall


def input_tokens_route(services: RouteServices, endpoint: ResponsesEndpoint) -> KeyRoute:
    """Return the route, which reads a body as `endpoint` does."""

    async def count(request: Request, principal: Principal) -> Response:
        generation = await endpoint.generation(await request.body(), principal, services.body_rules(principal))
        (prompt,) = generation.prompts
        call = TokenizeCall(messages=prompt.messages, add_special_tokens=False, chat=prompt.chat)
        reply = await services.ask_tokenizer(principal, generation.model, call)
        return json_response(InputTokenCount("response.input_tokens", len(reply.token_ids)))

    return KeyRoute("POST", f"{endpoint.path}/input_tokens", count, endpoint.dialect)
