"""The routes of resumable streams: list a key's running ones, go on reading one, and stop one.

Every part of a stream is found by its tenant alone: the stream of another tenant is as unknown as one that there is
not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.admission.auth import Principal
from gateway.api.door import exchange_of, head_of
from gateway.api.endpoint import Endpoint
from gateway.api.generation_service import GenerationService
from gateway.api.operation import Operation
from gateway.api.routes import KeyRoute, RouteServices, json_response
from gateway.api.schemas.checks import check_query, invalid_value, whole_number
from gateway.errors import ApiError
from gateway.http1.head import REQUEST_ID
from gateway.resumable.hub import StreamHub
from gateway.resumable.log import Stored, not_found
from gateway.streams.numbered import MAX_EVENT
from shared.bounds import MAX_NAME_BYTES

_PATH = "/v1/streams/{stream_id:path}"
_LAST_EVENT_ID = "last-event-id"


class StreamInfo(Struct, forbid_unknown_fields=True):
    """A stream that is generated. Its id is the `x-request-id` of its first answer."""

    id: str
    object: Literal["stream"]
    created: int
    model: str
    endpoint: str


class StreamEvent(Struct):
    """An event as the endpoint that began the stream sends it, with an id."""


class StreamList(Struct, forbid_unknown_fields=True):
    """The running streams of a key, the oldest first. With `has_more`, some of its tenant's streams were not read."""

    object: Literal["list"]
    data: list[StreamInfo]
    has_more: bool


class DeletedStream(Struct, forbid_unknown_fields=True):
    """A stream that is generated no more, and no longer kept."""

    id: str
    object: Literal["stream"]
    deleted: bool


class BackgroundStreams(Protocol):
    """Background responses, whose workers write down what they generate (`gateway.responses`)."""

    def is_one(self, stream_id: str) -> bool:
        """Whether a stream may be one of these, by its id."""

    async def stream(self, request: Request, stream_id: str, principal: Principal, starting_after: int) -> Response:
        """Return the events after a number; `ApiError` 404 for an unknown response."""

    async def forget(self, stream_id: str, principal: Principal) -> None:
        """Stop and delete a response; `ApiError` 404 for an unknown one."""


@dataclass(frozen=True, slots=True)
class StreamRoutes:
    """Handles the routes. Keeps nothing."""

    hub: StreamHub
    service: GenerationService
    endpoints: Mapping[str, Endpoint]
    services: RouteServices
    background: BackgroundStreams

    def routes(self) -> list[KeyRoute]:
        """Return the routes; each is for those who have a key."""
        return [
            KeyRoute("GET", "/v1/streams", self._list),
            KeyRoute("GET", _PATH, self._read),
            KeyRoute("DELETE", _PATH, self._delete),
        ]

    async def _list(self, request: Request, principal: Principal) -> Response:
        check_query(request, frozenset(), allow_unknown=self.services.config.allow_unknown_parameters)
        async with self.services.reads.turn(principal, "streams") as size:
            heads, has_more = await self.hub.running(principal, size)
        streams = [
            StreamInfo(head.id, "stream", int(head.created), head.model, endpoint.path)
            for head in heads
            if (endpoint := self.endpoints.get(head.form.endpoint)) is not None
        ]
        return json_response(StreamList("list", streams, has_more))

    async def _read(self, request: Request, principal: Principal) -> Response:
        check_query(request, frozenset({"from"}), allow_unknown=self.services.config.allow_unknown_parameters)
        first_event = _first_event(request)
        found = await self._found(request, principal)
        if isinstance(found, str):
            return await self.background.stream(request, found, principal, first_event - 1)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return _StreamResponse(partial(self._show, found, principal, first_event))

    async def _show(self, found: Stored, principal: Principal, first_event: int, scope: Scope) -> None:
        exchange, head = exchange_of(scope), head_of(scope)
        endpoint = self.endpoints[found.head.form.endpoint]
        head.dialect, head.first_event = endpoint.dialect, first_event
        # A client that goes on later names the stream as before.
        others = [header for header in exchange.more_headers if header[0] != REQUEST_ID]
        exchange.more_headers = [*others, (REQUEST_ID, found.head.id.encode())]
        stream = self.hub.open(found)
        head.status = await self.service.show(endpoint, stream, exchange, head, principal)

    async def _delete(self, request: Request, principal: Principal) -> Response:
        (await self.services.limiter.admit_read(principal)).release(1)
        found = await self._found(request, principal)
        if isinstance(found, str):
            await self.background.forget(found, principal)
            return json_response(DeletedStream(found, "stream", True))
        await self.hub.stop(found.head)
        return json_response(DeletedStream(found.head.id, "stream", True))

    async def _found(self, request: Request, principal: Principal) -> Stored | str:
        """Return the head of a stream, or the id of one that may be a background response."""
        stream_id: str = request.path_params["stream_id"]
        if exchange_of(request.scope).head.path.endswith("/"):
            # Routes are found without a slash at the end of the path. An id may end with one.
            try:
                return await self._named(f"{stream_id}/", principal)
            except ApiError as error:
                if error.status != 404:
                    raise
        return await self._named(stream_id, principal)

    async def _named(self, stream_id: str, principal: Principal) -> Stored | str:
        if not 1 <= len(stream_id.encode(errors="replace")) <= MAX_NAME_BYTES or "\0" in stream_id:
            raise not_found(stream_id)
        try:
            found = await self.hub.find(principal.tenant, stream_id)
        except ApiError as error:
            if error.status == 404 and self.background.is_one(stream_id):
                return stream_id
            raise
        form = found.head.form
        if not form.has_ids or form.endpoint not in self.endpoints or not principal.can_use(found.head.model):
            raise not_found(stream_id)
        return found


class _StreamResponse(Response):
    """An answer that `show` writes to the exchange of a scope."""

    def __init__(self, show: Callable[[Scope], Awaitable[None]]) -> None:
        super().__init__()
        self._show = show

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._show(scope)


def _first_event(request: Request) -> int:
    last, first = request.headers.get(_LAST_EVENT_ID), request.query_params.get("from")
    if last is not None and first is not None:
        raise invalid_value("from", "Give either 'from' or the header 'Last-Event-ID'.")
    if last is not None:
        return 1 + whole_number(last, "Last-Event-ID", 0, MAX_EVENT, 0)
    return whole_number(first, "from", 0, MAX_EVENT, 0)


OPERATIONS = (
    Operation("get", "/v1/streams", "List the running resumable streams of the key.", StreamList),
    Operation("get", "/v1/streams/{stream_id}", "Go on reading a resumable stream.", None, event=StreamEvent),
    Operation("delete", "/v1/streams/{stream_id}", "Stop a resumable stream, and forget it.", DeletedStream),
)
