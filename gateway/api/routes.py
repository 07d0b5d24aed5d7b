"""Every public route but those that generate: models, tokenizer, health. Each states who may call it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.admission.auth import KeyStore, Principal
from gateway.admission.limits import RateLimiter
from gateway.admission.stored_reads import StoredReads
from gateway.aliases.book import AliasBook
from gateway.aliases.table import no_such_model
from gateway.api.door import head_of
from gateway.api.large_bodies import LargeBodies
from gateway.api.model_fit import check_sees
from gateway.api.operation import Operation
from gateway.api.schemas.bodies import DetokenizeBody, TokenizeBody
from gateway.api.schemas.checks import invalid_value, missing_parameter, whole_number
from gateway.api.schemas.names import BodyRules
from gateway.api.schemas.parsing import parse_detokenize, parse_tokenize
from gateway.api.tokenizer_client import TokenizerClient
from gateway.config import GatewayConfig
from gateway.dispatch.nats_watch import NatsWatch
from gateway.errors import ApiError, model_not_found
from gateway.fleet.fleet import Fleet
from gateway.fleet.readiness import Status, readiness
from gateway.generation import ImageSource
from gateway.media.intake import ImageIntake
from gateway.metrics import GatewayMetrics
from gateway.streams.dialect import Dialect
from shared.features import IMAGES, own_version
from shared.tokenizer_calls import TokenizeCall, TokenizerCall, TokenizerReply


class ModelArchitecture(Struct, forbid_unknown_fields=True):
    """What a model reads, as OpenRouter's clients look for it."""

    input_modalities: list[Literal["text", "image"]]


class CapabilitySupport(Struct, forbid_unknown_fields=True):
    """Whether a model can do one thing."""

    supported: bool


class ModelCapabilities(Struct, forbid_unknown_fields=True):
    """What a model can do, by Anthropic's names."""

    image_input: CapabilitySupport


class ModelAnswer(Struct, forbid_unknown_fields=True):
    """A model that live workers serve. `max_model_len` is its context in tokens; then Anthropic's names.

    `root` is what an alias stands for, `parent` the model that an adapter is beside. What a model reads is null while
    no worker has said it.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    architecture: ModelArchitecture | None
    capabilities: ModelCapabilities | None


class ModelList(Struct, forbid_unknown_fields=True):
    """The models that the key may use."""

    object: Literal["list"]
    data: list[ModelAnswer]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TokenizeAnswer(Struct, forbid_unknown_fields=True):
    """Token ids of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class DetokenizeAnswer(Struct, forbid_unknown_fields=True):
    """The text of token ids."""

    prompt: str


class LiveAnswer(Struct, forbid_unknown_fields=True):
    """The process answers."""

    status: Literal["live"]


class ReadyAnswer(Struct, forbid_unknown_fields=True):
    """Whether a request could be served now, and for how many models."""

    status: Status
    models: int


class VersionAnswer(Struct, forbid_unknown_fields=True):
    """The version of the gateway."""

    version: str


OPERATIONS = (
    Operation("get", "/v1/models", "List the models.", ModelList),
    Operation("get", "/v1/models/{model}", "Show one model.", ModelAnswer),
    Operation("post", "/tokenize", "Turn a text or a conversation into token ids.", TokenizeAnswer, TokenizeBody),
    Operation("post", "/detokenize", "Turn token ids into text.", DetokenizeAnswer, DetokenizeBody),
    Operation("get", "/health/live", "Say that the process answers.", LiveAnswer, has_key=False),
    Operation("get", "/health/ready", "Say whether requests can be served.", ReadyAnswer, has_key=False),
    Operation("get", "/health", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("get", "/ping", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("post", "/ping", "The same as /health/ready.", ReadyAnswer, has_key=False),
    Operation("get", "/version", "Say which version this is.", VersionAnswer, has_key=False),
)


_PAGING = frozenset({"limit", "before_id", "after_id"})

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RouteServices:
    """The parts that routes use. One set per process; `wake` has hosts load a model that no request waits for yet."""

    config: GatewayConfig
    keys: KeyStore
    limiter: RateLimiter
    reads: StoredReads
    fleet: Fleet
    queue: NatsWatch
    tokenizer: TokenizerClient
    metrics: GatewayMetrics
    images: ImageIntake
    wake: Callable[[str], None] = lambda model: None
    bodies: LargeBodies = field(default_factory=LargeBodies)
    aliases: AliasBook = field(default_factory=AliasBook)

    async def read_body(
        self, request: Request, principal: Principal, parse: Callable[[bytes, BodyRules], Result]
    ) -> Result:
        """Return what `parse` makes of a body by the rules of its sender."""
        body = await request.body()
        read = partial(parse, body, self.body_rules(principal))
        return await self.bodies.read(principal.tenant, len(body), read)

    def body_rules(self, principal: Principal, model: str | None = None) -> BodyRules:
        """Return how the bodies of a key are read; `model` is named by the path."""
        config = self.config
        return BodyRules(config.allow_unknown_parameters, partial(self.only_model, principal), model)

    def only_model(self, principal: Principal) -> str | None:
        """Return the one model that a key may use and a worker serves; None where there are several, or none."""
        models = [name for name in self.fleet.served_models() if principal.can_use(name)]
        return models[0] if len(models) == 1 else None

    def model_or_only_one(self, principal: Principal, model: str | None) -> str:
        """Return the model that is named, or, without a name, the only one.

        Raises:
            ApiError: 404 for a model that is unknown, 400 where several could be meant.
        """
        if model is not None:
            if not principal.can_use(model):
                raise model_not_found(model)
            name, model = model, self.aliases.target(model, principal.tenant, self.fleet)
            # An adapter reads texts as its model does.
            found = self.fleet.find_adapter(model, principal.tenant)
            served = model if found is None else found.model
            if served not in self.fleet.models() and self.fleet.coming(served) is None:
                raise no_such_model(name, model)
            return served
        only = self.only_model(principal)
        if only is None:
            raise missing_parameter("model")
        return only

    async def ask_tokenizer(
        self,
        principal: Principal,
        model: str | None,
        call: TokenizerCall,
        images: Sequence[ImageSource] = (),
    ) -> TokenizerReply:
        """Count the call as a request without tokens, and make it. A model may be left out where there is only one.

        `images` are those of the call's conversation.

        Raises:
            ApiError: The model is unknown, the key's limits are reached, or no worker answers.
        """
        model = self.model_or_only_one(principal, model)
        lease = await self.limiter.admit(principal, 1, 0)
        try:
            if images and isinstance(call, TokenizeCall):
                check_sees(images, model, self.fleet.load(model))
                media = await self.images.references(images, principal.tenant)
                call = msgspec.structs.replace(call, media=media)
            coming = self.fleet.coming(model)
            if coming is not None:
                message = f"`{model}` is not loaded at the moment ({coming.state})"
                if coming.on_demand:
                    message += ", and this call does not load it: send the model a request first"
                raise ApiError(503, f"{message}.", code="no_worker", retry_after_s=2.0)
            return await self.tokenizer.call(model, principal.tenant, call)
        finally:
            lease.release()


@dataclass(frozen=True, slots=True)
class KeyRoute:
    """A route for those who have a key, beside the endpoints that generate."""

    method: str
    path: str
    handler: Callable[[Request, Principal], Awaitable[Response]]
    dialect: Dialect | None = None


def json_response(content: Any, status: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class PlainRoute:
    """A route with one answer to each request, as an ASGI application; `name` is its name in metrics."""

    def __init__(self, name: str, handler: Callable[[Request], Awaitable[Response]]) -> None:
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        head_of(scope).route = self._name
        response = await self._handler(Request(scope, receive))
        await response(scope, receive, send)


class Routes:
    """The handlers, and the table of the public port."""

    def __init__(self, services: RouteServices) -> None:
        self._services = services
        self._created = int(time.time())

    def public(self) -> list[Route]:
        """Return the routes of the public port."""
        keyed = (
            KeyRoute("GET", "/v1/models", self._list_models),
            KeyRoute("GET", "/v1/models/{model:path}", self._show_model),
            KeyRoute("POST", "/tokenize", self._tokenize),
            KeyRoute("POST", "/detokenize", self._detokenize),
        )
        # The names that other servers give to readiness, and load balancers ask for, stand beside our own.
        ready = (("GET", "/health/ready"), ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"))
        return [
            *map(self.with_key, keyed),
            _route("everyone", "GET", "/health/live", self._live),
            *(_route("everyone", method, path, self._ready) for method, path in ready),
            _route("everyone", "GET", "/version", self._version),
        ]

    def with_key(self, route: KeyRoute) -> Route:
        """Return a route behind the check of the key."""
        services = self._services

        async def handler(request: Request) -> Response:
            principal = services.keys.authenticate(request.scope["headers"])
            request.scope["state"].update(body_owner=principal.body_owner, inflater=services.bodies)
            return await route.handler(request, principal)

        return _route("key", route.method, route.path, handler)

    async def _list_models(self, request: Request, principal: Principal) -> Response:
        names, has_more = _page([name for name in self._names(principal) if principal.can_use(name)], request)
        first, last = (names[0], names[-1]) if names else (None, None)
        return json_response(ModelList("list", [self._model(name, principal) for name in names], has_more, first, last))

    async def _show_model(self, request: Request, principal: Principal) -> Response:
        name: str = request.path_params["model"]
        if not principal.can_use(name) or name not in self._names(principal):
            raise model_not_found(name)
        return json_response(self._model(name, principal))

    def _names(self, principal: Principal) -> list[str]:
        fleet, tenant = self._services.fleet, principal.tenant
        names = (*fleet.served_models(), *fleet.adapters(tenant), *self._services.aliases.visible(tenant, fleet))
        return list(dict.fromkeys(names))

    def _model(self, name: str, principal: Principal) -> ModelAnswer:
        fleet = self._services.fleet
        target = self._services.aliases.target(name, principal.tenant, fleet)
        adapter = fleet.find_adapter(target, principal.tenant)
        parent = None if adapter is None or adapter.digest is None else adapter.model
        load = fleet.load(parent or target)
        max_model_len = load.max_model_len or None if load is not None else None
        # None while no worker has said it.
        sees = (IMAGES in load.features) if load is not None and load.num_workers else None
        if not self._services.config.max_images:
            sees = False
        return ModelAnswer(
            id=name,
            object="model",
            created=self._created,
            owned_by="headrace",
            root=target,
            parent=parent,
            max_model_len=max_model_len,
            type="model",
            display_name=name,
            created_at=datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            lifecycle="active",
            max_input_tokens=max_model_len,
            architecture=None if sees is None else ModelArchitecture(["text", "image"] if sees else ["text"]),
            capabilities=None if sees is None else ModelCapabilities(CapabilitySupport(sees)),
        )

    async def _tokenize(self, request: Request, principal: Principal) -> Response:
        model, call, images = await self._services.read_body(request, principal, parse_tokenize)
        reply = await self._services.ask_tokenizer(principal, model, call, images)
        return json_response(TokenizeAnswer(len(reply.token_ids), reply.max_model_len, reply.token_ids, None))

    async def _detokenize(self, request: Request, principal: Principal) -> Response:
        model, call = await self._services.read_body(request, principal, parse_detokenize)
        reply = await self._services.ask_tokenizer(principal, model, call)
        return json_response(DetokenizeAnswer(reply.text))

    async def _live(self, request: Request) -> Response:
        return json_response(LiveAnswer("live"))

    async def _version(self, request: Request) -> Response:
        return json_response(VersionAnswer(own_version()))

    async def _ready(self, request: Request) -> Response:
        ready = readiness(self._services.fleet, is_connected=self._services.queue.is_connected)
        # Model names are for those who have a key.
        return json_response(ReadyAnswer(ready.status, len(ready.models)), 200 if ready.is_ready else 503)


def _page(names: list[str], request: Request) -> tuple[list[str], bool]:
    """Return the names that a query of Anthropic's clients asks for, all without one, and whether more follow there.

    Pages are sorted: where a model has come or gone, the next page still begins behind the last.
    """
    query = request.query_params
    if not _PAGING & query.keys():
        return names, False
    limit = whole_number(query.get("limit"), "limit", 1, 1000, len(names))
    before, after = query.get("before_id"), query.get("after_id")
    if before is not None and after is not None:
        raise invalid_value("before_id", "Give either 'before_id' or 'after_id'.")
    if before is not None:
        names = sorted(name for name in names if name < before)
        return names[max(0, len(names) - limit) :], len(names) > limit
    names = sorted(name for name in names if after is None or name > after)
    return names[:limit], len(names) > limit


def _route(access: str, method: str, path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
    return Route(path, PlainRoute(path, handler), methods=[method], name=f"{access}:{path}")
