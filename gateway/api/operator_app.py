"""The operator's port: metrics, the detailed health and the console, behind the operator's key.

It is a listener of its own, so that clients cannot reach these routes whatever key they have, and so that a full public
port does not hide them. Every route asks for the key, or refuses web pages where there is none; a path that is not
listed here is a 404, as on the public port. Orders about models go to their hosts from here.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from nats.aio.client import Client
from nats.errors import Error as NatsError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.admission.auth import bearer_token, may_be_web_page, unauthorized
from gateway.api.adapter_orders import AdapterList, AdapterOrders
from gateway.api.door import Port, application
from gateway.api.routes import PlainRoute, json_response
from gateway.api.schemas.checks import unknown_parameter
from gateway.api.schemas.decoding import decode_typed
from gateway.cache.redis_client import RedisCache
from gateway.errors import ApiError, model_not_found
from gateway.fleet.fleet import Fleet
from gateway.fleet.hosted_models import HostedModels
from gateway.fleet.readiness import readiness
from gateway.fleet.worker_needs import WorkerNeeds
from gateway.metrics import GatewayMetrics
from shared.calls import call_process
from shared.direct_client import DirectClient
from shared.errors import InvalidNameError
from shared.hosted_models import Action, ModelOrder, ModelReply
from shared.log_limit import LogLimit
from shared.messages import UNDECODABLE, encode
from shared.subjects import model_order_subject

TIMEOUT_S = 10.0
ACTIONS: tuple[Action, ...] = ("load", "replace", "unload", "sleep", "wake")
_HOSTED_MODELS = "/v1/hosted_models"


class _Where(Struct):
    host: str | None = None


class ModelOrders:
    """Asks hosts; a body need not name one where only one can be meant."""

    def __init__(self, nats: Client, hosted: HostedModels) -> None:
        self._nats = nats
        self._hosted = hosted

    async def order(self, action: Action, content: bytes) -> dict[str, Any]:
        """Send an order to a host; return the host, the name and the action once it has accepted.

        Raises:
            ApiError: The body is malformed, no host can be meant, or the host refuses.
        """
        order, host = _decoded(action, content)
        host = self._host(order, host)
        try:
            subject = model_order_subject(host)
            answer = await call_process(self._nats, subject, encode(order), TIMEOUT_S)
            reply = msgspec.msgpack.decode(answer.data, type=ModelReply)
        except (NatsError, TimeoutError, InvalidNameError, *UNDECODABLE):
            message = f"The host {host!r} does not answer."
            raise ApiError(503, message, code="no_host", retry_after_s=2.0) from None
        if reply.error is not None:
            raise ApiError(400, reply.error, code="order_refused")
        return {"host": host, "name": order.name, "action": action}

    def _host(self, order: ModelOrder, host: str | None) -> str:
        known = [beat.host for beat in self._hosted.beats()]
        if host is not None:
            if host not in known:
                raise ApiError(404, f"host: no host {host[:64]!r} is heard; heard: {_listed(known)}.", param="host")
            return host
        candidates = known if order.action == "load" else self._hosted.hosts_of(order.name)
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            raise ApiError(400, f"host: name one of {_listed(candidates)}.", param="host")
        if known:
            raise ApiError(404, f"name: no host has the model {order.name[:64]!r}.", param="name")
        message = "No host is heard: start `headrace host` on a machine, or `headrace up`."
        raise ApiError(404, message, code="no_host")


def _decoded(action: Action, content: bytes) -> tuple[ModelOrder, str | None]:
    # Each field of an order may be given, but what the route says of it.
    fields = decode_typed(dict[str, Any], content)
    unknown = set(fields) - set(ModelOrder.__struct_fields__) - {"host"}
    if unknown or "action" in fields:
        raise unknown_parameter(min(unknown or {"action"}))
    host = decode_typed(_Where, content).host
    order = {name: value for name, value in fields.items() if name != "host"}
    order |= {"action": action, "type": "model_order"}
    return decode_typed(ModelOrder, msgspec.json.encode(order)), host


def _listed(names: list[str]) -> str:
    return ", ".join(sorted(names))[:200] or "none"


_NO_WEB_PAGES = (
    "Without a key this port answers a Host of `localhost` or a loopback address only, and no request with an Origin, "
    "so that web pages cannot read it. For other names, start the gateway with HEADRACE_OPERATOR_KEY."
)

_logger = logging.getLogger(__name__)


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class OperatorRoute:
    """A route; one that `is_open` has no data, and needs no key."""

    path: str
    handler: Handler
    method: str = "GET"
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class OperatorServices:
    """Parts that the operator's routes use, one set per process; without a `key` they answer all but web pages."""

    key: str | None
    fleet: Fleet
    queue: DirectClient
    redis: RedisCache | None
    metrics: GatewayMetrics
    registry: CollectorRegistry
    needs: WorkerNeeds
    adapters: AdapterOrders
    more: Sequence[OperatorRoute] = ()


def create_operator_app(services: OperatorServices) -> ASGIApp:
    """Return the application of the operator's port."""
    routes = OperatorRoutes(services).routes()
    return application(routes, Port(services.metrics, partial(_advice, [route.path for route in routes])))


def _advice(served: Sequence[str], path: str) -> str:
    """Return what to do instead of asking for a path that is not served."""
    if path.startswith(f"{_HOSTED_MODELS}/"):
        return f"The actions are {', '.join(ACTIONS)}: POST {_HOSTED_MODELS}/load, for example."
    # Some paths are served with two methods.
    each_once = ", ".join(dict.fromkeys(each.replace(":path}", "}") for each in served))
    return f"The operator's port has {each_once}; the API is at the public port."


class OperatorRoutes:
    """The handlers; each checks who asks."""

    def __init__(self, services: OperatorServices) -> None:
        self._services = services
        # A client of the port must not be able to fill the log.
        self._log_limit = LogLimit(_logger)
        self._key_hash = None if services.key is None else _hash(services.key)

    def routes(self) -> list[Route]:
        """Return the table."""
        adapters, hosted = self._services.adapters, self._services.fleet.hosted
        models = ModelOrders(self._services.queue, hosted)
        return [
            self._route("/health/live", partial(_shown, lambda: {"status": "live"})),
            self._route("/health/ready", self._detail),
            self._route("/metrics", self._metrics),
            self._route("/v1/scaling", self._scaling),
            self._route("/v1/scaling/{model:path}", self._scaling),
            self._route("/v1/adapters", partial(_shown, lambda: AdapterList(adapters.shown()))),
            self._route("/v1/load_lora_adapter", partial(_ordered, adapters.load), "POST"),
            self._route("/v1/unload_lora_adapter", partial(_ordered, adapters.unload), "POST"),
            self._route(_HOSTED_MODELS, partial(_shown, lambda: {"hosts": hosted.shown()})),
            *(
                self._route(f"{_HOSTED_MODELS}/{each}", partial(_ordered, partial(models.order, each)), "POST")
                for each in ACTIONS
            ),
            *(self._route(each.path, each.handler, each.method, is_open=each.is_open) for each in self._services.more),
        ]

    def _route(self, path: str, handler: Handler, method: str = "GET", *, is_open: bool = False) -> Route:
        async def endpoint(request: Request) -> Response:
            if is_open:
                return await handler(request)
            try:
                self._check_access(request)
            except ApiError:
                client = request.client.host if request.client else "?"
                self._log_limit.warning(
                    client, "refused at the operator's port", extra={"path": path, "client": client}
                )
                raise
            return await handler(request)

        name = f"operator:{path}"
        return Route(path, PlainRoute(name, endpoint), methods=[method], name=name)

    def _check_access(self, request: Request) -> None:
        if self._key_hash is None:
            if may_be_web_page(request.headers.raw):
                raise ApiError(403, _NO_WEB_PAGES, code="forbidden")
            return
        if "authorization" not in request.headers:
            raise unauthorized("This port needs the operator's key. Send it as `Authorization: Bearer <key>`.")
        # Hashes have one length, so the time of the comparison tells nothing of the key, not even how long it is.
        if not hmac.compare_digest(_hash(bearer_token(request.headers.raw)), self._key_hash):
            raise unauthorized("Incorrect operator key provided.")

    async def _detail(self, request: Request) -> Response:
        content = _detail(self._services)
        return json_response(content, 200 if content["status"] == "ready" else 503)

    async def _scaling(self, request: Request) -> Response:
        needs, model = self._services.needs.shown(), request.path_params.get("model")
        if model is None:
            return json_response({"models": needs})
        if model not in needs:
            raise model_not_found(model)
        return json_response(needs[model])

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._services.registry), media_type=CONTENT_TYPE_LATEST)


async def _shown(show: Callable[[], object], request: Request) -> Response:
    return json_response(show())


async def _ordered(order: Callable[[bytes], Awaitable[str | dict[str, Any]]], request: Request) -> Response:
    told = await order(await request.body())
    return PlainTextResponse(told) if isinstance(told, str) else json_response(told)


def _detail(services: OperatorServices) -> dict[str, Any]:
    fleet, queue, redis = services.fleet, services.queue, services.redis
    loads = [load for model in fleet.models() if (load := fleet.load(model)) is not None]
    return {
        "status": readiness(fleet, is_connected=queue.is_connected).status,
        "nats": "connected" if queue.is_connected else "away",
        "redis": "none" if redis is None else "connected" if redis.is_available else "away",
        "models": {load.model: msgspec.structs.asdict(load) for load in loads},
    }


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
