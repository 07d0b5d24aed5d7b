"""An administrator's side of the dead letters: read them, put their requests back onto a queue, drop them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError, NotFoundError

from ops.cli.running_system import delete_message
from shared.batch_streams import ensure_batch_stream, jetstream_problem
from shared.dead_letters import DeadLetter
from shared.errors import DependencyError, HeadraceError
from shared.messages import UNDECODABLE, Lane, Request, encode_request
from shared.streams import DEAD_STREAM, ENDS_STREAM, RESULTS_STREAM, StreamLimits, tenant_stream_config
from shared.subjects import dead_letter_filter, end_subject, request_subject, result_subject

_FINISHED = ("stop", "length")
_QUEUE_FULL = 10077


class NotRetriedError(HeadraceError):
    """A request in quarantine cannot be put back; the message says why."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters are meant; None and an empty set mean any."""

    model: str | None = None
    lane: Lane | None = None
    tenant: str | None = None
    ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StoredLetter:
    """A dead letter and its number in the stream."""

    seq: int
    letter: DeadLetter


class DeadLetterBox:
    """Works on the stream of dead letters as an administrator; `DependencyError` where NATS fails."""

    def __init__(self, nats: Client) -> None:
        self._nats = nats
        self._js = nats.jetstream()
        self._decode = msgspec.msgpack.Decoder(DeadLetter).decode

    async def letters(self, selection: Selection) -> AsyncIterator[StoredLetter]:
        """Yield the selected letters, oldest first; one that cannot be read is left out."""
        subject = dead_letter_filter(selection.model, selection.lane, selection.tenant)
        try:
            last = (await self._js.stream_info(DEAD_STREAM)).state.last_seq
            seq = 0
            while seq < last:
                message = await self._js.get_msg(DEAD_STREAM, seq=seq + 1, subject=subject, next=True)
                assert message.seq is not None
                seq = message.seq
                letter = self._read(message.data or b"")
                if letter is not None and (not selection.ids or letter.request.id in selection.ids):
                    yield StoredLetter(seq, letter)
        except NotFoundError as error:
            # 10037 is the end of the selected letters; else the stream itself is missing.
            if error.err_code != 10037:
                raise DependencyError("the stream HR_DEAD does not exist; run `headrace setup`") from error
        except NatsTimeoutError as error:
            raise DependencyError(jetstream_problem(self._js)) from error
        except (APIError, NatsError) as error:
            raise DependencyError(f"the dead letters cannot be read: {error!r}") from error

    async def retry(self, stored: StoredLetter) -> str:
        """Put a request onto the batch queue again with a fresh count of attempts, and return its result's subject.

        An interactive request becomes a batch job of its tenant: the client who waited for it has been answered.

        Raises:
            NotRetriedError: The request has a good result already, its prompt was not kept, or its tenant's queue is
                full.
        """
        request = stored.letter.request
        if not stored.letter.is_whole:
            raise NotRetriedError(f"request {request.id!r} was too large to be kept whole; publish it again")
        result = result_subject(request.tenant, request.id)
        try:
            await self._clear_failure(request, result)
            # A tenant of the HTTP API may have no batch queue yet.
            await ensure_batch_stream(self._js, tenant_stream_config(request.tenant, StreamLimits()))
            headers = {"Nats-Msg-Id": f"{result}/retry-{stored.seq}"}
            subject = request_subject(request.model, "batch", request.tenant)
            await self._js.publish(subject, encode_request(_fresh(request)), headers=headers)
        except (APIError, NatsError) as error:
            if isinstance(error, APIError) and error.err_code == _QUEUE_FULL:
                raise NotRetriedError(
                    f"request {request.id!r}: the batch queue of tenant {request.tenant!r} is full; retry it later"
                ) from error
            raise DependencyError(f"request {request.id!r} could not be put back: {error!r}") from error
        await self.drop(stored)
        return result

    async def drop(self, stored: StoredLetter) -> None:
        """Delete a letter; one that is gone already is not an error."""
        try:
            await delete_message(self._js, DEAD_STREAM, stored.seq)
        except (APIError, NatsError) as error:
            raise DependencyError(f"dead letter {stored.seq} could not be deleted: {error!r}") from error

    async def _clear_failure(self, request: Request, result: str) -> None:
        """Delete the stored result that says the request failed: a result is written only where there is none."""
        with contextlib.suppress(NotFoundError):
            message = await self._js.get_last_msg(RESULTS_STREAM, result)
            if json.loads(message.data or b"{}").get("finish") in _FINISHED:
                raise NotRetriedError(
                    f"request {request.id!r} of tenant {request.tenant!r} has a result already; drop it"
                )
            await self._js.purge_stream(RESULTS_STREAM, subject=result)
        # A job that has ended is not run again.
        await self._js.purge_stream(ENDS_STREAM, subject=end_subject(request.tenant, request.id))

    def _read(self, payload: bytes) -> DeadLetter | None:
        try:
            return self._decode(payload)
        except UNDECODABLE:
            return None


def _fresh(request: Request) -> Request:
    """Return the request as a new batch job; no client waits for it, so it has no deadline."""
    attempts = {"epoch": 0, "emitted": (), "evicted": None, "ready": None}
    return msgspec.structs.replace(request, lane="batch", deadline=None, reply=None, created=time.time(), **attempts)
