"""The routes of batches: create, list, show, cancel. Each is for those who have a key, and its tenant's batches.

`batch_routes` makes the files and batches of a gateway process from its settings: the store, the routes, the drivers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from nats.js.errors import NoStreamResponseError, NotFoundError
from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.auth import Principal
from gateway.admission.stored_reads import ReadSize
from gateway.api.output_reading import StructuredOutputAdmission
from gateway.api.routes import KeyRoute, RouteServices, json_response
from gateway.api.schemas.checks import check_query, invalid_value, whole_number
from gateway.api.schemas.decoding import decode_typed
from gateway.api.schemas.names import BodyRules
from gateway.batches.driver_services import DriverServices
from gateway.batches.drivers import BatchDrivers
from gateway.batches.lease import cancelled
from gateway.batches.line import PARSERS
from gateway.batches.log import ERRORS, BatchLog, ReplacedError, Stored
from gateway.batches.output import growing_file
from gateway.batches.record import ENDED, KINDS, OUTPUT_ID, BatchBody, BatchList, BatchRecord, batch_answer
from gateway.batches.record import OPERATIONS as BATCH_OPERATIONS
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError
from gateway.files.catalog import FileCatalog, Hooks, ReadableFile
from gateway.files.endpoint import FileRoutes, checked_after
from gateway.files.objects import OPERATIONS as FILE_OPERATIONS
from gateway.files.objects import ordered_hex
from gateway.files.upload import checked_expiry
from shared.batch_streams import batch_stream
from shared.direct_client import DirectClient
from shared.errors import ConfigError
from shared.kept_results import KeptResults
from shared.objects.open import store_of
from shared.objects.store import StoreAwayError, StoreError
from shared.server_clock import ServerClock
from shared.subjects import BATCH_ID
from shared.task_supervisor import TaskSupervisor

_PATH = "/v1/batches"
# Of one tenant, at once. Each takes a record of a few kilobytes every other second.
MAX_ACTIVE = 64
_MAX_PAGE = 100
OPEN_S = 5.0
"""A directory that takes longer to answer at the start is opened later."""
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_WINDOW_S = 7 * 86_400
_METADATA = (16, 64, 512)

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchRoutes:
    """Handles the routes."""

    services: RouteServices
    catalog: FileCatalog
    log: BatchLog
    drivers: BatchDrivers
    nats: DirectClient
    clock: ServerClock
    _creating: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def routes(self) -> list[KeyRoute]:
        """Return the routes."""
        return [
            KeyRoute("POST", _PATH, self._create),
            KeyRoute("GET", _PATH, self._list),
            KeyRoute("GET", f"{_PATH}/{{batch_id}}", self._show),
            KeyRoute("POST", f"{_PATH}/{{batch_id}}/cancel", self._cancel),
        ]

    def hooks(self) -> Hooks:
        """Return what files have to know of batches."""
        return Hooks(growing=self._growing, user_of=self._user_of)

    async def _create(self, request: Request, principal: Principal) -> Response:
        body = await self.services.read_body(request, principal, _parse)
        lease = await self.services.limiter.admit(principal, 1, 0)
        try:
            record = await self._record(body, principal)
            revision = await _answered(self._put(record))
            await _answered(self.log.bound(principal.tenant))
        finally:
            lease.release()
        self.services.metrics.batches_created += 1
        answer = json_response(batch_answer(record))
        # Where it fails, the watch finds the batch.
        with contextlib.suppress(*ERRORS):
            await self.drivers.take(Stored(record, revision))
        return answer

    async def _record(self, body: BatchBody, principal: Principal) -> BatchRecord:
        window_s = _window_s(body.completion_window)
        if body.endpoint not in PARSERS:
            raise invalid_value("endpoint", f"'endpoint' must be one of {', '.join(PARSERS)}.")
        _check_metadata(body.metadata or {})
        expiry = body.output_expires_after
        name = "output_expires_after.seconds"
        output_expires_after_s = None if expiry is None else checked_expiry(name, str(expiry.seconds))
        file = await self.catalog.get(principal.tenant, body.input_file_id)
        if file is None:
            message = f"No such File object: {body.input_file_id[:128]}"
            raise ApiError(400, message, param="input_file_id", code="file_not_found")
        if file.purpose != "batch":
            raise invalid_value("input_file_id", "The input file must have been uploaded with purpose 'batch'.")
        with self.catalog.answering():
            await self.catalog.open()
        now = self.clock.now()
        return BatchRecord(
            id=f"batch_{ordered_hex(now)}",
            tenant=principal.tenant,
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            created_at=int(now),
            expires_at=int(now) + window_s,
            metadata=body.metadata,
            output_expires_after_s=output_expires_after_s,
            models=None if principal.models is None else sorted(principal.models),
            max_priority=principal.max_priority,
            key=principal.key_id,
            weight=principal.weight,
            store=self.catalog.identity,
        )

    async def _put(self, record: BatchRecord) -> int:
        # One after another, so that each counts those before it. Other gateways may put one at the same time.
        async with self._creating.setdefault(record.tenant, asyncio.Lock()):
            await self._check_queue(record.tenant)
            return await self.log.put(record, 0)

    async def _check_queue(self, tenant: str) -> None:
        try:
            await self.nats.jetstream().stream_info(batch_stream(tenant))
        except NotFoundError:
            message = f"This tenant has no batch queue. The operator makes it: `headrace setup --tenants {tenant}`."
            raise ApiError(400, message, code="batch_unavailable") from None
        if len(await self.log.list_active(tenant)) >= MAX_ACTIVE:
            message = f"{MAX_ACTIVE} batches of this tenant run already. Wait until one has ended, or cancel one."
            raise ApiError(429, message, code="too_many_batches", retry_after_s=60.0)

    async def _list(self, request: Request, principal: Principal) -> Response:
        allow_unknown = self.services.config.allow_unknown_parameters
        check_query(request, frozenset({"after", "limit"}), allow_unknown=allow_unknown)
        limit = whole_number(request.query_params.get("limit"), "limit", 1, _MAX_PAGE, 20)
        after = checked_after(request.query_params.get("after"), BATCH_ID)
        async with self.services.reads.turn(principal, "batches") as size:
            page, has_more = await _answered(self.log.page(principal.tenant, limit, after, size))
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(BatchList("list", list(map(batch_answer, page)), first, last, has_more))

    async def _show(self, request: Request, principal: Principal) -> Response:
        batch_id: str = request.path_params["batch_id"]
        async with self.services.reads.turn(principal, "batches"):
            record = await _answered(self.log.get(principal.tenant, batch_id))
        if record is None:
            raise _not_found(batch_id)
        return json_response(batch_answer(record))

    async def _cancel(self, request: Request, principal: Principal) -> Response:
        async with self.services.reads.turn(principal, "batches"):
            record = await self._cancelled(principal.tenant, request.path_params["batch_id"])
        return json_response(batch_answer(record))

    async def _cancelled(self, tenant: str, batch_id: str) -> BatchRecord:
        while True:
            stored = await _answered(self.log.active(tenant, batch_id))
            if stored is None:
                ended = await _answered(self.log.get(tenant, batch_id))
                if ended is None:
                    raise _not_found(batch_id)
                raise _has_ended(ended)
            record = stored.record
            if record.status in ENDED or record.status == "finalizing":
                raise _has_ended(record)
            if record.status == "cancelling":
                return record
            record = cancelled(record, self.clock.now())
            try:
                await _answered(self.log.put(record, stored.revision))
                return record
            except ReplacedError:
                continue

    async def _growing(self, tenant: str, file_id: str) -> ReadableFile | None:
        found = OUTPUT_ID.fullmatch(file_id)
        if found is None:
            return None
        record = await _answered(self.log.get(tenant, f"batch_{found[1]}"))
        kind = next(kind for kind in KINDS if kind == found[2])
        return None if record is None or record.status in ENDED else growing_file(self.catalog, record, kind)

    async def _user_of(self, tenant: str, file_id: str, size: ReadSize) -> str | None:
        found = OUTPUT_ID.fullmatch(file_id)
        if found is not None:
            own = await _answered(self.log.get(tenant, f"batch_{found[1]}"))
            return None if own is None or own.status in ENDED else own.id
        for _, batch_id in await _answered(self.log.list_active(tenant)):
            size.num_records += 1
            stored = await _answered(self.log.active(tenant, batch_id))
            if stored is not None and stored.record.input_file_id == file_id:
                return batch_id
        return None


def _parse(data: bytes, rules: BodyRules) -> BatchBody:
    return decode_typed(BatchBody, data)


def _window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        message = "'completion_window' must be a number with s, m, h or d behind it, up to 7d: '24h'."
        raise invalid_value("completion_window", message)
    return seconds


def _check_metadata(metadata: dict[str, Any]) -> None:
    num, key, value = _METADATA
    is_large = len(metadata) > num
    for name, text in metadata.items():
        if not isinstance(text, str):
            place = f"metadata.{name[:64]}"
            raise invalid_value(place, f"'{place}' must be a text.")
        sizes = [len(each.encode(errors="replace")) for each in (name, text)]
        is_large |= sizes[0] > key or sizes[1] > value
    if is_large:
        message = f"'metadata' has up to {num} pairs, names of up to {key} and texts of up to {value} bytes of UTF-8."
        raise invalid_value("metadata", message)


async def _answered(call: Awaitable[Result]) -> Result:
    try:
        return await call
    except (NoStreamResponseError, NotFoundError) as error:
        message = "The server has no log of batches yet. The operator makes it: `headrace setup`."
        raise ApiError(503, message, code="batch_log_unavailable", retry_after_s=30.0) from error
    except ERRORS as error:
        message = "The log of batches does not answer at the moment. Try again shortly."
        raise ApiError(503, message, code="batch_log_unavailable", retry_after_s=2.0) from error


def _has_ended(record: BatchRecord) -> ApiError:
    message = f"Cannot cancel a batch with status '{record.status}'."
    return ApiError(400, message, param="batch_id", code="invalid_batch_status")


def _not_found(batch_id: str) -> ApiError:
    shown = batch_id if BATCH_ID.fullmatch(batch_id) else batch_id[:128]
    return ApiError(404, f"No batch found with id '{shown}'.", param="batch_id", code="batch_not_found")


async def open_directory(catalog: FileCatalog) -> None:
    """Open a store at the start; `ConfigError` if its path is wrong.

    Storage that does not answer must not keep a gateway from serving people. Like a bucket, the drivers open it later.
    """
    place = catalog.store.place
    try:
        async with asyncio.timeout(OPEN_S):
            await catalog.open()
    except (StoreAwayError, TimeoutError) as error:
        problem = str(error) or f"{place} does not answer"
        _log.warning("files and batches are not served until their store is back: %s", problem)
    except StoreError as error:
        raise ConfigError("HEADRACE_FILES", str(error)) from error
    else:
        _log.info("files are in %s: all gateways have to reach the same directory, or one bucket", place)


async def batch_routes(
    stack: contextlib.AsyncExitStack,
    services: RouteServices,
    grammars: StructuredOutputAdmission,
    nats: DirectClient,
    dispatcher: Dispatcher,
    kept: KeptResults,
    tasks: TaskSupervisor,
) -> list[KeyRoute]:
    """Return the routes of files and batches; closing the stack ends the drivers. A bad store is a `ConfigError`."""
    assert services.config.files is not None, "there are no batches without files"
    store = store_of(services.config.files, "HEADRACE_FILES")
    stack.push_async_callback(store.close)
    log, clock, fleet = BatchLog(nats), dispatcher.clock, dispatcher.fleet
    catalog = FileCatalog(store, services.config.files_tenant_bytes, services.metrics, clock.now)
    if store.is_local:
        await open_directory(catalog)
    settled = partial(services.aliases.settled, fleet=fleet)
    own = (services.bodies, services.images, fleet, services.keys.watermark_of, settled, grammars, services.tokenizer)
    driver_services = DriverServices(nats, log, catalog, kept, clock, *own, services.wake)
    drivers = BatchDrivers(driver_services, services.metrics, dispatcher.name)
    stack.push_async_callback(drivers.close)
    for work, name in ((drivers.watch_forever(), "watch of batches"), (catalog.sweep_forever(), "sweep of files")):
        stack.push_async_callback(tasks.stop, tasks.start(work, name))
    routes = BatchRoutes(services, catalog, log, drivers, nats, clock)
    catalog.hooks = routes.hooks()
    services.images.read_file = catalog.read_whole
    return [*FileRoutes(services, catalog).routes(), *routes.routes()]


def unserved_routes() -> list[KeyRoute]:
    """Return the same routes for a gateway that has no store."""
    operations = (*FILE_OPERATIONS, *BATCH_OPERATIONS)
    return [KeyRoute(each.method.upper(), each.path, _refuse) for each in operations]


async def _refuse(request: Request, principal: Principal) -> Response:
    message = "This gateway has no store of files, which /v1/files and /v1/batches need. The operator sets --files."
    raise ApiError(404, message, code="files_not_served")
