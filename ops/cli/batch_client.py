"""A batch publisher's side of the queue: publish requests, and wait for their results."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import StaleConnectionError, UnexpectedEOF
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from ops.cli.running_system import shown_names
from ops.stack.console import told_of_nats
from shared.audit import servers_in
from shared.errors import DependencyError
from shared.messages import Request, encode_request
from shared.nats_connection import connect
from shared.nats_files import NatsFiles
from shared.streams import RESULTS_STREAM
from shared.subjects import request_subject, result_subject

# After this time without a result the client tells the publisher: it may not hear workers, so nothing else would.
SILENCE_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
# A lost connection is reported once, by the disconnect callback: each attempt to reconnect raises one of these too.
_OF_CONNECTIONS = (OSError, UnexpectedEOF, StaleConnectionError)
# A result that passed by while we were reconnecting is found in the stream.
_LOOK_EVERY_S = 2.0


class BatchClient:
    """An async context manager around one connection in the batch role. What fails raises `DependencyError`."""

    def __init__(
        self,
        url: str,
        user: str | None,
        password: str | None,
        files: NatsFiles,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Prepare; the connection is made on entering.

        `tell` gets notices: NATS or results take long, or the connection is lost or back.
        """
        self._tell = tell
        self._access = (url, user, password, files)
        self._client: Client | None = None
        self._is_leaving = False
        self._refusals: asyncio.Queue[str] = asyncio.Queue()

    async def __aenter__(self) -> BatchClient:
        """Connect."""
        url, user, password, files = self._access
        with told_of_nats(url, _CONNECT_TIMEOUT_S, self._tell):
            self._client = await connect(
                url,
                role="batch",
                name="headrace-publish",
                user=user,
                password=password,
                files=files,
                on_error=self._take_note,
                on_disconnect=self._tell_of_loss,
                on_reconnect=self._tell_of_return,
                timeout_s=_CONNECT_TIMEOUT_S,
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        self._is_leaving = True
        await self._client.close()

    async def publish(self, request: Request) -> str:
        """Put a request onto the queue and return the subject of its result.

        A request that is published again is answered by the result it has.
        """
        assert self._client is not None
        subject = request_subject(request.model, "batch", request.tenant)
        result = result_subject(request.tenant, request.id)
        payload = encode_request(request)
        try:
            # A publication repeated within the tenant's duplicate window is stored once.
            publication = self._client.jetstream().publish(subject, payload, headers={"Nats-Msg-Id": request.id})
            await self._unless_refused(publication, request.tenant)
        except NoStreamResponseError as error:
            raise DependencyError(
                f"tenant {request.tenant[:64]!r} has no batch queue; an administrator makes one: `headrace setup "
                "--tenants ...`"
            ) from error
        except APIError as error:
            raise DependencyError(f"the queue refuses request {request.id!r}: {error.description}") from error
        except NatsError as error:
            raise DependencyError(f"request {request.id!r} could not be published: {error!r}") from error
        return result

    async def results(self, requests: list[Request], timeout_s: float) -> AsyncIterator[dict[str, Any]]:
        """Publish the requests and yield each result as it arrives."""
        assert self._client is not None
        arrived: asyncio.Queue[Msg] = asyncio.Queue()
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        for tenant in {request.tenant for request in requests}:
            await self._client.subscribe(result_subject(tenant, "any").rpartition(".")[0] + ".*", cb=arrived.put)
        missing = {await self.publish(request): request.model for request in requests}
        heard_at: float | None = clock()
        while missing:
            if heard_at is not None and clock() > heard_at + SILENCE_S:
                models = shown_names(sorted(set(missing.values())))
                self._tell(
                    f"no result for {clock() - heard_at:.0f} s, {len(missing)} of {len(requests)} are missing, of "
                    f"{models}; jobs wait in the queue until a worker serves their model and has "
                    "capacity that people do not want; GET /v1/models of a gateway lists the models that are served"
                )
                heard_at = None
            wait_s = min(_LOOK_EVERY_S, deadline - clock())
            if wait_s <= 0:
                raise DependencyError(
                    f"after {timeout_s:g} s {len(missing)} of {len(requests)} results are missing, such as "
                    f"{min(missing)}; published requests stay in the queue until a worker serves their model"
                )
            try:
                message = await asyncio.wait_for(arrived.get(), wait_s)
                found = {message.subject: message.data} if message.subject in missing else {}
            except TimeoutError:
                found = await self._stored(set(missing))
            for subject, data in found.items():
                missing.pop(subject, None)
                heard_at = clock()
                yield json.loads(data)

    async def _unless_refused(self, publication: Awaitable[Any], tenant: str) -> None:
        """Wait for a publication's acknowledgement; for a forbidden subject NATS sends an error instead."""
        published = asyncio.ensure_future(publication)
        refused = asyncio.ensure_future(self._refusals.get())
        await asyncio.wait({published, refused}, return_when=asyncio.FIRST_COMPLETED)
        if published.done():
            refused.cancel()
            await published
        else:
            published.cancel()
            raise DependencyError(
                f"NATS does not let this user publish jobs of the tenant {tenant[:64]!r}: use that tenant's own login. "
                f"Beside `headrace up`, `headrace setup --tenants {shlex.quote(tenant[:64])}` makes it and --tenant "
                "uses it; elsewhere `headrace tenant` makes it"
            )

    async def _take_note(self, error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            self._refusals.put_nowait(str(error))
        elif self._client is not None and not isinstance(error, _OF_CONNECTIONS):
            self._tell(f"NATS reports: {error}")

    async def _tell_of_loss(self) -> None:
        if not self._is_leaving and self._client is not None:
            self._tell(f"the connection to NATS at {servers_in(self._access[0])} is lost; waiting for it to come back")

    async def _tell_of_return(self) -> None:
        self._tell("NATS is back")

    async def _stored(self, subjects: set[str]) -> dict[str, bytes]:
        assert self._client is not None
        found = {}
        for subject in subjects:
            try:
                message = await self._client.jetstream().get_last_msg(RESULTS_STREAM, subject, direct=True)
            except (NotFoundError, NatsTimeoutError):
                continue
            found[subject] = message.data or b""
        return found
