"""The batch queues: a stream for each tenant, so that none can fill, delay, or confuse the queue of another.

`HR_BATCH_<tenant>` holds the jobs `hr.req.*.batch.<tenant>`, and background responses in a queue of their own,
`hr.req.*.background.<tenant>`. Bytes, messages, waiting time and the window in which a
`Nats-Msg-Id` counts as published already are the tenant's own. Streams are made by an administrator, `headrace setup
--tenants`; a tenant that has none can store nothing. Workers look for new ones as they run.
"""

from __future__ import annotations

import contextlib
import json

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NotFoundError

from shared.errors import DependencyError, InvalidNameError
from shared.nats_connection import has_jetstream, is_clustered
from shared.subjects import Queue, decode_name, encode_name

DEFAULT_TENANT = "default"
TENANT_QUEUES: tuple[Queue, ...] = ("batch", "background")
# Key in a stream's metadata: seconds after which a job that no worker has taken is given the result `expired`.
MAX_WAIT_KEY = "headrace_max_wait_s"
# NATS leaves calls that a user may not make unanswered, as it does calls without a responder.
_NO_ANSWER = (
    "NATS does not answer JetStream calls: check HEADRACE_NATS_USER "
    "(`headrace setup` and `headrace dead` need the admin user)."
)
_NO_LEADER = (
    "NATS does not answer JetStream calls: its cluster elects a leader, which takes some seconds after the loss of a "
    "server and is impossible while most servers are away; or HEADRACE_NATS_USER may not make these calls "
    "(`headrace setup` and `headrace dead` need the admin user)."
)
_NO_CONNECTION = "the connection to NATS is lost; it is tried again until NATS is back."
_NO_JETSTREAM = "NATS runs without JetStream: start it with JetStream enabled, as `nats-server -js` or ops/nats does."

_PREFIX = "HR_BATCH_"
_TIMEOUT_S = 5.0


def batch_stream(tenant: str) -> str:
    """Return the name of a tenant's stream."""
    return _PREFIX + encode_name(tenant)


async def ensure_batch_stream(js: JetStreamContext, config: StreamConfig) -> None:
    """Make a tenant's stream if it is missing; `DependencyError` if we may not, or there is no storage for it."""
    assert config.name is not None
    try:
        await js.stream_info(config.name)
    except NotFoundError:
        try:
            await js.add_stream(config)
        except (APIError, NatsError) as error:
            raise DependencyError(
                f"NATS stream {config.name} is missing and could not be created ({error}). Create it with an "
                "administrator's credentials, `headrace setup --tenants`, or give NATS more storage."
            ) from error
    except NatsTimeoutError as error:
        raise DependencyError(jetstream_problem(js)) from error


def jetstream_problem(js: JetStreamContext) -> str:
    """Say why a call to JetStream was not answered: NATS lets only those that may ask hear an answer."""
    if not js._nc.is_connected:
        return _NO_CONNECTION
    if not has_jetstream(js._nc):
        return _NO_JETSTREAM
    return _NO_LEADER if is_clustered(js._nc) else _NO_ANSWER


async def batch_tenants(nats: Client, model: str, queue: Queue = "batch") -> list[str]:
    """Return the tenants that have a stream with this queue; `DependencyError` if NATS does not answer."""
    request = {"subject": f"hr.req.{encode_name(model)}.{queue}.*"}
    names: list[str] = []
    try:
        while True:
            body = json.dumps(request | {"offset": len(names)}).encode()
            page = json.loads((await nats.request("$JS.API.STREAM.NAMES", body, timeout=_TIMEOUT_S)).data)
            names += page.get("streams") or []
            if not page.get("streams") or len(names) >= page.get("total", 0):
                break
    except (NatsError, ValueError) as error:
        raise DependencyError(f"NATS does not list its streams: {error!r}") from error
    return sorted(tenant for name in names if (tenant := _tenant_of(name)) is not None)


def _tenant_of(stream: str) -> str | None:
    with contextlib.suppress(InvalidNameError):
        return decode_name(stream.removeprefix(_PREFIX)) if stream.startswith(_PREFIX) else None
    return None
