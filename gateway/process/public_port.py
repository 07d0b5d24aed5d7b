"""The public port's application, assembled from all APIs that it serves."""

from __future__ import annotations

from gateway.anthropic.endpoint import MessagesEndpoint, count_tokens_route
from gateway.api.app import create_app
from gateway.api.door import Application
from gateway.api.endpoint import ChatEndpoint, CompletionEndpoint, Endpoint
from gateway.api.generation_service import GenerationService
from gateway.api.request_observer import RequestObserver
from gateway.api.routes import KeyRoute, RouteServices
from gateway.llama_cpp.infill import InfillEndpoint
from gateway.llama_cpp.routes import LlamaCppRoutes
from gateway.openapi.document import OPENAPI_ROUTE
from gateway.pooling.endpoints import EmbeddingsEndpoint, RerankEndpoint, ScoreEndpoint
from gateway.responses.compact_endpoint import CompactEndpoint
from gateway.responses.endpoint import ResponsesEndpoint, input_tokens_route
from gateway.responses.store import ResponseStore
from gateway.responses.stored import StoredResponses


def public_app(
    service: GenerationService, services: RouteServices, responses: ResponseStore, observer: RequestObserver | None
) -> Application:
    """Return what answers every request on the public port.

    Raises:
        ConfigError: A setting of the APIs is wrong.
    """
    bodies = services.bodies
    responses_endpoint = ResponsesEndpoint(responses, bodies)
    endpoints: list[Endpoint] = [
        ChatEndpoint(bodies),
        CompletionEndpoint(bodies),
        MessagesEndpoint(bodies),
        responses_endpoint,
        CompactEndpoint(responses, bodies),
        EmbeddingsEndpoint(bodies),
        RerankEndpoint(bodies),
        ScoreEndpoint(bodies),
        InfillEndpoint(bodies),
    ]
    routes: list[KeyRoute] = [
        count_tokens_route(services),
        input_tokens_route(services, responses_endpoint),
        *StoredResponses(responses, services.config.allow_unknown_parameters).routes(),
        *LlamaCppRoutes(services).routes(),
    ]
    return create_app(services, service, endpoints, routes, [OPENAPI_ROUTE], observer)
