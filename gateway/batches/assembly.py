"""Files and batches of a gateway process, from its settings: the store, the routes, the drivers."""

from __future__ import annotations

import contextlib
import logging
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.auth import Principal
from gateway.api.routes import KeyRoute, RouteServices
from gateway.batches.driver import DriverServices
from gateway.batches.drivers import BatchDrivers
from gateway.batches.endpoint import BatchRoutes
from gateway.batches.log import BatchLog
from gateway.batches.record import OPERATIONS as BATCH_OPERATIONS
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError
from gateway.files.catalog import FileCatalog
from gateway.files.endpoint import FileRoutes
from gateway.files.objects import OPERATIONS as FILE_OPERATIONS
from shared.direct_client import DirectClient
from shared.kept_results import KeptResults
from shared.objects.open import opened_store
from shared.task_supervisor import TaskSupervisor

_log = logging.getLogger(__name__)


async def batch_routes(
    stack: contextlib.AsyncExitStack,
    files: str,
    services: RouteServices,
    nats: DirectClient,
    dispatcher: Dispatcher,
    kept: KeptResults,
    tasks: TaskSupervisor,
) -> list[KeyRoute]:
    """Return the routes of files and batches; closing the stack ends the drivers. A bad store is a `ConfigError`."""
    store, name = await opened_store(files, "HEADRACE_FILES")
    stack.push_async_callback(store.close)
    if store.is_local:
        _log.info("files are in %s: all gateways have to reach the same directory, or one bucket", store.place)
    catalog = FileCatalog(store, name, services.config.files_tenant_bytes, services.metrics)
    log, clock, fleet = BatchLog(nats), dispatcher.clock, dispatcher.fleet
    settled = partial(services.aliases.settled, fleet=fleet)
    driver_services = DriverServices(
        nats,
        log,
        catalog,
        kept,
        clock,
        services.bodies,
        services.images,
        fleet,
        services.keys.watermark_of,
        settled,
    )
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
