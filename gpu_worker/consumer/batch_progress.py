"""Progress records of batch requests, from which the next worker continues.

A record is written from time to time while the request runs, and when it is given back; it belongs to one message and
one revision of the model. Deliveries up to the recorded one are not failed attempts. A request that lost a worker is
recorded more often, since a late token may kill workers. Periodic records of a tenant are bounded in bytes a second;
those that decide about attempts are always written.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable

import msgspec
from nats.aio.client import Client
from nats.js.errors import APIError, NotFoundError

from gpu_worker.consumer.held_request import HeldRequest, log_fields
from gpu_worker.consumer.queued_message import QueuedMessage
from shared.batch_progress import BatchProgress
from shared.nats_connection import SEND_ERRORS
from shared.streams import PROGRESS_STREAM
from shared.subjects import progress_subject

FOLLOWED_INTERVAL_S = 0.25
# A record holds all tokens so far, so long texts are recorded less often: no request writes more tokens a second than
# this, however long its text is.
_RECORDED_TOKENS_PER_S = 8192

# Of one tenant by one worker. At six workers the stream (64 MB) holds what a tenant writes in 5 s, in which every
# running request is recorded again.
TENANT_BYTES_PER_S = 2 << 20
_BURST_S = 4.0

_LOST_TOKENS = 32
"""New tokens after which the progress of a request that has lost a worker is recorded again."""

_NUM_READS = 5
_READ_INTERVAL_S = 1.0
_TIMEOUT_S = 2.0
_ERRORS: tuple[type[Exception], ...] = (APIError, *SEND_ERRORS)

_log = logging.getLogger(__name__)


NO_PROGRESS = BatchProgress(b"", 0, "", 0)


def is_due(held: HeldRequest, now: float) -> bool:
    """Return whether a request that is followed, or has lost a worker, is to be recorded again; `now` is monotonic."""
    num_new = held.num_output_tokens - held.num_recorded_tokens
    is_at_risk = held.was_lost and num_new >= _LOST_TOKENS
    if num_new <= 0 or not (held.request.is_followed or is_at_risk):
        return False
    interval_s = 0.0 if is_at_risk else FOLLOWED_INTERVAL_S
    return now >= held.recorded_at + max(interval_s, held.num_output_tokens / _RECORDED_TOKENS_PER_S)


class ProgressRecords:
    """Reads and writes records for workers of one revision of a model. Keeps what tenants wrote lately."""

    def __init__(self, nats: Client, revision: str) -> None:
        self._nats = nats
        self._js = nats.jetstream(timeout=_TIMEOUT_S)
        self._revision = revision
        self._decode = msgspec.msgpack.Decoder(BatchProgress).decode
        # When each tenant's records so far would be written at `TENANT_BYTES_PER_S`, in monotonic seconds.
        self._paid_until: dict[str, float] = {}

    def has_room(self, tenant: str) -> bool:
        """Return whether a periodic record of a tenant is within its rate."""
        return self._paid_until.get(tenant, 0.0) <= time.monotonic() + _BURST_S

    async def save(self, held: HeldRequest) -> bool:
        """Record a request's progress; return whether that is stored."""
        request, message = held.request, held.message
        token_ids = list(request.emitted)
        if held.sequence is not None:
            start = held.sequence.num_prompt_tokens
            token_ids = held.sequence.token_ids[start : start + held.num_output_tokens]
        record = BatchProgress(
            hashlib.sha256(message.data).digest(),
            message.stream_seq,
            self._revision,
            message.num_delivered - held.num_failed - held.is_charged,
            tuple(token_ids),
            "".join(held.parts),
            held.in_reasoning,
            held.total_logprob,
            held.adapter,
            held.evicted,
        )
        payload = msgspec.msgpack.encode(record)
        begin = max(self._paid_until.get(request.tenant, 0.0), time.monotonic())
        self._paid_until[request.tenant] = begin + len(payload) / TENANT_BYTES_PER_S
        try:
            await self._js.publish(progress_subject(request.tenant, request.id), payload)
        except _ERRORS as error:
            _log.warning("progress of a batch request not recorded", extra=log_fields(request) | {"error": repr(error)})
            return False
        return True

    async def find(self, held: HeldRequest, is_wanted: Callable[[], bool]) -> BatchProgress:
        """Return the record of a request, trying again while NATS does not answer and `is_wanted`.

        Without a record, which may have been evicted, no request is given up: only the last delivery counts as failed.
        """
        request, message = held.request, held.message
        for _ in range(_NUM_READS):
            record = await self.load(request.tenant, request.id, message)
            if record is not None:
                return record
            await asyncio.sleep(_READ_INTERVAL_S)
            if not is_wanted():
                break
        return _unknown(message)

    async def load(self, tenant: str, request_id: str, message: QueuedMessage) -> BatchProgress | None:
        """Return the progress record; empty if absent or unreadable, None if NATS does not answer."""
        try:
            found = await self._js.get_last_msg(PROGRESS_STREAM, progress_subject(tenant, request_id))
            record = self._decode(found.data or b"")
        except NotFoundError:
            return _unknown(message)
        except msgspec.MsgspecError as error:
            _log.warning("progress of a batch request is malformed", extra={"id": request_id, "error": repr(error)})
            return _unknown(message)
        except _ERRORS as error:
            _log.warning("progress of a batch request not read", extra={"id": request_id, "error": repr(error)})
            return None
        if (record.digest, record.stream_seq) != (hashlib.sha256(message.data).digest(), message.stream_seq):
            return NO_PROGRESS
        if record.revision != self._revision:
            return msgspec.structs.replace(record, token_ids=(), text="")
        return record


def _unknown(message: QueuedMessage) -> BatchProgress:
    """Return the record to assume where there is none: the last delivery failed, the others did not."""
    return msgspec.structs.replace(NO_PROGRESS, num_delivered=max(0, message.num_delivered - 2))
