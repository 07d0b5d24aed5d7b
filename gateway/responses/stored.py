"""The routes of responses that are stored: read one, follow it, list the items of its request, cancel and delete it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.admission.auth import Principal
from gateway.api.routes import KeyRoute, json_response
from gateway.api.schemas.checks import check_query, invalid_value, is_ascending, whole_number
from gateway.errors import ApiError
from gateway.responses.background import BackgroundStream
from gateway.responses.draft import DeletedResponse, InputItemList
from gateway.responses.items import is_response_id, listed_item
from gateway.responses.log import PieceBudget, ResponseRecord, has_ended
from gateway.responses.names import ENCRYPTED_REASONING, LOGPROBS, check_includes
from gateway.responses.store import ResponseStore
from gateway.streams.event_stream import EVENT_STREAM_HEADERS
from gateway.streams.numbered import MAX_EVENT

_PATH = "/v1/responses/{response_id}"
_EVENT_STREAM_HEADERS = {name.decode(): value.decode() for name, value in EVENT_STREAM_HEADERS}
_INCLUDE = frozenset({"include", "include[]"})
_RETRIEVE = _INCLUDE | {"stream", "starting_after", "include_obfuscation"}
_LIST = _INCLUDE | {"order", "limit", "after"}
_DEFAULT_ITEMS = 20
_MAX_ITEMS = 100

Read = Callable[[str, str, PieceBudget], Awaitable[ResponseRecord | None]]


class StoredResponses:
    """Handles the routes. Keeps nothing.

    They raise an `ApiError`: 404 if the tenant has no such response, or none of the background where one is needed; 410
    if its output is no longer kept; 429 if the key has read enough, or the tenant follows enough; 503 without NATS.
    """

    def __init__(self, store: ResponseStore, allow_unknown: bool = False) -> None:
        self._store = store
        self._allow_unknown = allow_unknown

    def routes(self) -> list[KeyRoute]:
        """Return the routes; each is for those who have a key, and finds the responses of their tenant alone."""
        return [
            KeyRoute("GET", _PATH, self._retrieve),
            KeyRoute("DELETE", _PATH, self._delete),
            KeyRoute("POST", f"{_PATH}/cancel", self._cancel),
            KeyRoute("GET", f"{_PATH}/input_items", self._list_input),
        ]

    async def _retrieve(self, request: Request, principal: Principal) -> Response:
        check_query(request, _RETRIEVE, allow_unknown=self._allow_unknown)
        record = await self._find(request, principal)
        _check_include(request, record)
        is_stream = (stream := request.query_params.get("stream", "false").lower()) == "true"
        if stream not in ("true", "false"):
            raise invalid_value("stream", "'stream' must be 'true' or 'false'.")
        if "starting_after" in request.query_params and not is_stream:
            message = (
                "'starting_after' is the number of an event, so it needs 'stream=true'. Add it, or leave both out."
            )
            raise invalid_value("starting_after", message)
        if request.method == "HEAD" or not is_stream:
            return Response(record.response, media_type="application/json")
        if record.job is None:
            message = "Only a background response can be streamed again. Retrieve this one without 'stream'."
            raise invalid_value("stream", message)
        starting_after = whole_number(request.query_params.get("starting_after"), "starting_after", 0, MAX_EVENT, -1)
        return _FollowingStream(BackgroundStream(record, self._store, starting_after), self._store)

    def is_one(self, stream_id: str) -> bool:
        """Whether a stream may be a response, by its id."""
        return is_response_id(stream_id)

    async def stream(self, request: Request, response_id: str, principal: Principal, starting_after: int) -> Response:
        """Return the events of a background response after an event, each with its number as its id."""
        async with self._store.reading(principal) as budget:
            record = await self._found(response_id, principal, budget, self._store.get)
        if record.job is None:
            raise _not_found(response_id)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        stream = _FollowingStream(BackgroundStream(record, self._store, starting_after, has_ids=True), self._store)
        if has_ended(record):
            await stream.begin()
        return stream

    async def forget(self, response_id: str, principal: Principal) -> None:
        """Delete a response; one that is still computed is cancelled."""
        async with self._store.reading(principal) as budget:
            # As it lies in the log: one whose output is no longer kept can be deleted too.
            record = await self._found(response_id, principal, budget, self._store.log.get)
        await self._store.delete(record)

    async def _cancel(self, request: Request, principal: Principal) -> Response:
        async with self._store.reading(principal) as budget:
            record = await self._found(_id(request), principal, budget, self._store.get)
            if record.job is None:
                message = "Only a background response can be cancelled. End another one by closing its connection."
                raise invalid_value("id", message)
            record = await self._store.cancel(record, budget)
        return Response(record.response, media_type="application/json")

    async def _delete(self, request: Request, principal: Principal) -> Response:
        await self.forget(_id(request), principal)
        return json_response(DeletedResponse(_id(request), "response", True))

    async def _list_input(self, request: Request, principal: Principal) -> Response:
        check_query(request, _LIST, allow_unknown=self._allow_unknown)
        record = await self._find(request, principal)
        _check_include(request, record)
        query = request.query_params
        limit = whole_number(query.get("limit"), "limit", 1, _MAX_ITEMS, _DEFAULT_ITEMS)
        items = record.draft.input if is_ascending(request) else record.draft.input[::-1]
        after = query.get("after")
        if after is not None:
            position = next((i for i, item in enumerate(items) if item.id == after), None)
            if position is None:
                raise invalid_value("after", f"There is no item with id '{after[:128]}'.")
            items = items[position + 1 :]
        # An item can have thousands of parts, so that their text does not tell how long this takes.
        page = await self._store.bodies.in_thread(
            principal.tenant, lambda: [listed_item(item) for item in items[:limit]]
        )
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return json_response(InputItemList("list", page, first, last, has_more=len(items) > len(page)))

    async def _find(self, request: Request, principal: Principal) -> ResponseRecord:
        async with self._store.reading(principal) as budget:
            return await self._found(_id(request), principal, budget, self._store.get)

    async def _found(self, response_id: str, principal: Principal, budget: PieceBudget, read: Read) -> ResponseRecord:
        record = await read(principal.tenant, response_id, budget) if is_response_id(response_id) else None
        if record is None or not principal.can_use(record.model):
            raise _not_found(response_id)
        return record


def _id(request: Request) -> str:
    response_id: str = request.path_params["response_id"]
    return response_id


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id[:128]}' not found.", param="id", code="response_not_found")


class _FollowingStream(StreamingResponse):
    """The events of a job as an answer. It is counted from its making to its end, also if it never begins."""

    def __init__(self, follower: BackgroundStream, store: ResponseStore) -> None:
        self._events = follower.events()
        super().__init__(self._events, headers=_EVENT_STREAM_HEADERS)
        self._follower = follower
        self._store = store
        store.add_follower(follower)

    async def begin(self) -> None:
        """Wait for the first event; without one, answer that there is nothing more."""
        try:
            first = await anext(self._events, None)
        except BaseException:
            self._store.remove_follower(self._follower)
            raise
        self.status_code = 204 if first is None else 200
        self.body_iterator = _joined(first, self._events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._store.remove_follower(self._follower)


async def _joined(first: bytes | None, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first is not None:
        yield first
    async for each in rest:
        yield each


def _check_include(request: Request, record: ResponseRecord) -> None:
    """Refuse output that was not asked for when the response was made, since it is not there."""
    values = [value for name in _INCLUDE for value in request.query_params.getlist(name)]
    check_includes(values)
    made = {ENCRYPTED_REASONING: record.draft.has_encrypted_reasoning, LOGPROBS: record.draft.has_logprobs}
    for value in values:
        if not made.get(value, True):
            raise invalid_value("include", f"'{value}' has to be in 'include' when the response is made. Leave it out.")
