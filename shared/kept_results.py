"""Stores results of batch jobs: each once, with a record of its end that is kept for longer than the result.

A result is stored only while its subject is empty, so a job that two workers finish has one result. The end says when
and how a job ended, in about 100 bytes. It lets workers refuse to run a finished job again, and gateways tell a result
that is no longer kept from one that does not exist yet. Stored bytes count against the tenant (`ResultShares`).
Methods raise the errors of NATS (`SEND_ERRORS`) where it does not answer or refuses.
"""

from __future__ import annotations

import logging
import time

import msgspec
from msgspec import Struct
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError

from shared import bounds
from shared.log_limit import LogLimit
from shared.messages import FinishReason
from shared.publication import last_message, publish_expecting
from shared.result_shares import ResultShares
from shared.streams import ENDS_STREAM, RESULTS_STREAM
from shared.subjects import end_subject, result_subject

JOB_ENDED = "job_ended_before"
"""Error code of a job that is not run because one of its id has ended, and whose result is no longer kept."""

# After an end that NATS does not let us store, results are stored without ends for this long.
_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


class JobEnd(Struct, frozen=True, array_like=True):
    """How and when a job ended, in Unix seconds by the clock of NATS."""

    finish: FinishReason
    ended: bounds.UnixSeconds


class KeptResults:
    """Stores results and their ends; `shares` counts what each tenant stores.

    Methods raise an error of `nats.errors` if NATS refuses or does not answer, and `OSError` if the connection fails.
    """

    def __init__(self, js: JetStreamContext, shares: ResultShares) -> None:
        self._js = js
        self.shares = shares
        self._decode_end = msgspec.msgpack.Decoder(JobEnd).decode
        self._paused_until = 0.0
        self._log_limit = LogLimit(_log)

    async def store(self, tenant: str, request_id: str, payload: bytes, finish: FinishReason) -> bool:
        """Store an encoded result, then its end; return False if there is a result already."""
        subject = result_subject(tenant, request_id)
        async with self.shares.storing(tenant, len(subject) + len(payload)) as numbers:
            stored = await publish_expecting(self._js, subject, payload, 0)
            if stored is not None:
                numbers.append(stored)
            # Also where there was a result: the worker that stored it may have died before it stored the end.
            await self._store_end(tenant, request_id, finish)
        return stored is not None

    async def result(self, tenant: str, request_id: str) -> bytes | JobEnd | None:
        """Return a job's encoded result, how it ended if that is no longer kept, or None while it has not ended."""
        found = await self.stored(tenant, request_id)
        if found is not None:
            return found
        end = await self.end_of(tenant, request_id)
        # It may have ended between the two reads.
        return None if end is None else await self.stored(tenant, request_id) or end

    async def stored(self, tenant: str, request_id: str) -> bytes | None:
        """Return a job's encoded result; raises as `result`."""
        found = await last_message(self._js, RESULTS_STREAM, result_subject(tenant, request_id))
        return None if found is None else found.data or b""

    async def end_of(self, tenant: str, request_id: str) -> JobEnd | None:
        """Return how a job ended; None if that is not known."""
        try:
            found = await last_message(self._js, ENDS_STREAM, end_subject(tenant, request_id))
            return None if found is None else self._decode_end(found.data or b"")
        except msgspec.MsgspecError as error:
            self._log_limit.warning(tenant, "the record of a job's end cannot be read: %s", error)
            return None

    async def _store_end(self, tenant: str, request_id: str, finish: FinishReason) -> None:
        """Store the end of a job unless it has one.

        A missing stream or permission must not keep the result from being acknowledged, so it is only logged.
        """
        if time.monotonic() < self._paused_until:
            return
        end = msgspec.msgpack.encode(JobEnd(finish, self.shares.clock.now()))
        try:
            await publish_expecting(self._js, end_subject(tenant, request_id), end, 0)
        except (NoStreamResponseError, NatsTimeoutError) as error:
            self._paused_until = time.monotonic() + _PAUSE_S
            self._log_limit.warning(
                "ends",
                "the end of a job was not stored (%r): check that `headrace setup` and NATS's permissions are of this "
                "version; no more ends are stored for %g s",
                error,
                _PAUSE_S,
            )
