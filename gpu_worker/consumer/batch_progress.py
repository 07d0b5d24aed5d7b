"""What a batch request has so far, kept where its next worker finds it.

Written from time to time while it runs, several times a second where somebody follows it, and when it is given back;
read when a request is delivered again. A worker continues after the tokens that are recorded, and deliveries up to the
recorded one are no failed attempts: a drain is none, and progress clears the count. The delivery of a suspect counts
once its trial has begun. A record is for one message and one revision of the model; any other is ignored.
"""

from __future__ import annotations

import hashlib
import logging

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

_TIMEOUT_S = 2.0
_ERRORS: tuple[type[Exception], ...] = (APIError, *SEND_ERRORS)
_UNREADABLE: tuple[type[Exception], ...] = (*_ERRORS, msgspec.MsgspecError)

_log = logging.getLogger(__name__)


NO_PROGRESS = BatchProgress(b"", 0, "", 0)


def is_due(held: HeldRequest, now: float) -> bool:
    """Say whether the progress of a request that is followed is to be recorded again; `now` is monotonic time."""
    if not held.request.is_followed or held.num_output_tokens <= held.num_recorded_tokens:
        return False
    pause_s = max(FOLLOWED_INTERVAL_S, held.num_output_tokens / _RECORDED_TOKENS_PER_S)
    return now >= held.recorded_at + pause_s


class ProgressRecords:
    """Reads and writes records for workers of one revision of a model. Keeps no state."""

    def __init__(self, nats: Client, revision: str) -> None:
        """Write over `nats`."""
        self._nats = nats
        self._js = nats.jetstream(timeout=_TIMEOUT_S)
        self._revision = revision
        self._decode = msgspec.msgpack.Decoder(BatchProgress).decode

    async def save(self, held: HeldRequest) -> bool:
        """Record what a request has; say whether that is stored."""
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
        )
        try:
            await self._js.publish(progress_subject(request.tenant, request.id), msgspec.msgpack.encode(record))
        except _ERRORS as error:
            _log.warning("progress of a batch request not recorded", extra=log_fields(request) | {"error": repr(error)})
            return False
        return True

    async def load(self, tenant: str, request_id: str, message: QueuedMessage) -> BatchProgress:
        """Return the record of a request; an empty one when there is none that can be used."""
        try:
            found = await self._js.get_last_msg(PROGRESS_STREAM, progress_subject(tenant, request_id))
            record = self._decode(found.data or b"")
        except NotFoundError:
            return NO_PROGRESS
        except _UNREADABLE as error:
            _log.warning("progress of a batch request not read", extra={"id": request_id, "error": repr(error)})
            return NO_PROGRESS
        if (record.digest, record.stream_seq) != (hashlib.sha256(message.data).digest(), message.stream_seq):
            return NO_PROGRESS
        if record.revision != self._revision:
            return msgspec.structs.replace(record, token_ids=(), text="")
        return record
