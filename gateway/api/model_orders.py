"""`/v1/hosted_models` at the operator's port: what hosts serve, and orders to load, replace and unload models there."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from nats.aio.client import Client
from nats.errors import Error as NatsError

from gateway.api.schemas.checks import unknown_parameter
from gateway.api.schemas.decoding import decode_typed
from gateway.errors import ApiError
from gateway.fleet.hosted_models import HostedModels
from shared.calls import call_process
from shared.errors import InvalidNameError
from shared.hosted_models import Action, ModelOrder, ModelReply
from shared.messages import UNDECODABLE, encode
from shared.subjects import model_order_subject

TIMEOUT_S = 10.0
ACTIONS: tuple[Action, ...] = ("load", "replace", "unload", "sleep", "wake")


class _Where(Struct):
    """The field of a body that says which host is meant; it may be left out where only one can be."""

    host: str | None = None


class ModelOrders:
    """Asks hosts."""

    def __init__(self, nats: Client, hosted: HostedModels) -> None:
        self._nats = nats
        self._hosted = hosted

    async def order(self, action: Action, content: bytes) -> dict[str, Any]:
        """Have a host carry out an order; return what it is told to do.

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
