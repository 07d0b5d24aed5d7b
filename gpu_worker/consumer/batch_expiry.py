"""Jobs that wait for too long, for instance because no worker serves their model, get the result `expired`.

Every worker looks at the oldest job of every tenant's queue. A job waits from the time at which NATS stored it until
now by NATS's own clock; one that was given to a worker may take as long again. The result is written where there is
none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from datetime import datetime

import msgspec
from nats.aio.client import Client
from nats.js.api import RawStreamMsg
from nats.js.errors import NotFoundError

from gpu_worker.consumer.held_request import log_fields
from gpu_worker.consumer.queued_message import UnreadableRequestError, read_request
from gpu_worker.consumer.result_store import send_result
from shared.batch_streams import MAX_WAIT_KEY, batch_stream
from shared.errors import InvalidNameError
from shared.kept_results import KeptResults
from shared.messages import BatchResult
from shared.nats_connection import SEND_ERRORS
from shared.subjects import decode_name, request_subject

# Jobs expired in one round; more are left to the next round and to other workers.
_MAX_JOBS = 1000
_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class _State(msgspec.Struct):
    messages: int = 0
    first_seq: int = 0


class _Config(msgspec.Struct):
    metadata: dict[str, str] = {}


class _StreamInfo(msgspec.Struct):
    """What NATS says of a stream; `ts` is the server's own time."""

    ts: str = ""
    state: _State = msgspec.field(default_factory=_State)
    config: _Config = msgspec.field(default_factory=_Config)


class BatchExpiry:
    """Expires jobs, which lie in the queues. Keeps the age of each queue's oldest job of one model, for metrics."""

    def __init__(self, nats: Client, kept: KeptResults, model: str) -> None:
        self._nats = nats
        self._kept = kept
        self._model = model
        self._js = nats.jetstream()
        self._decode = msgspec.json.Decoder(_StreamInfo).decode
        # When each tenant's oldest job of the model was stored, in monotonic seconds of this process.
        self._oldest: dict[str, float] = {}

    def oldest_s(self, tenants: Iterable[str]) -> float:
        """Return the age of the oldest job of these tenants, as of the last round; 0 where there is none."""
        stored = [self._oldest[tenant] for tenant in tenants if tenant in self._oldest]
        return time.monotonic() - min(stored) if stored else 0.0

    async def expire(self, tenant: str) -> int:
        """Expire the jobs of a tenant that have waited too long; return how many. NATS may raise its `Error`."""
        stream = batch_stream(tenant)
        for num_expired in range(_MAX_JOBS):
            info = self._decode((await self._nats.request(f"$JS.API.STREAM.INFO.{stream}", timeout=_TIMEOUT_S)).data)
            self._oldest.pop(tenant, None)
            max_wait_s = _seconds(info.config.metadata.get(MAX_WAIT_KEY, ""))
            if max_wait_s is None or not info.state.messages:
                return num_expired
            try:
                message = await self._js.get_msg(stream, seq=info.state.first_seq)
            except NotFoundError:
                return num_expired  # just taken
            assert message.time is not None
            waited_s = (_time(info.ts) - message.time).total_seconds()
            await self._note_oldest(tenant, info, message)
            subject = message.subject or ""
            is_recent = waited_s <= 2 * max_wait_s
            if waited_s <= max_wait_s or (is_recent and await self._is_taken(stream, subject, message)):
                return num_expired
            if not await self._end(tenant, subject, message, max_wait_s, _time(info.ts)):
                return num_expired
            await self._js.delete_msg(stream, info.state.first_seq)
            await asyncio.sleep(0)
        return _MAX_JOBS

    async def _note_oldest(self, tenant: str, info: _StreamInfo, first: RawStreamMsg) -> None:
        """Keep the age of the tenant's oldest job of this model; `first` is the oldest of all models."""
        own = request_subject(self._model, "batch", tenant)
        if first.subject != own:
            try:
                first = await self._js.get_msg(batch_stream(tenant), seq=first.seq, subject=own, next=True)
            except NotFoundError:
                return
        assert first.time is not None
        self._oldest[tenant] = time.monotonic() - (_time(info.ts) - first.time).total_seconds()

    async def _is_taken(self, stream: str, subject: str, message: RawStreamMsg) -> bool:
        model, queue = subject.split(".")[2:4]
        try:
            consumer = await self._js.consumer_info(stream, f"{model}-{queue}")
        except (NotFoundError, ValueError):
            # A publisher may use any token as the model's, and NATS's client refuses some as names of consumers.
            return False
        assert message.seq is not None
        return consumer.delivered is not None and consumer.delivered.stream_seq >= message.seq

    async def _end(self, tenant: str, subject: str, message: RawStreamMsg, max_wait_s: float, now: datetime) -> bool:
        try:
            model = decode_name(subject.split(".")[2])
            request = msgspec.structs.replace(read_request(message.data or b""), model=model, tenant=tenant)
        except (UnreadableRequestError, InvalidNameError):
            return True  # there is no subject for a result
        assert message.time is not None
        error = f"no worker took the job within {max_wait_s:g} s"
        result = BatchResult(
            id=request.id,
            model=model,
            tenant=tenant,
            text="",
            finish="expired",
            error=error,
            attempt=0,
            created=request.created or message.time.timestamp(),
            completed=now.timestamp(),
        )
        payload = msgspec.json.encode(result)
        try:
            is_first = await self._kept.store(tenant, request.id, payload, "expired")
        except SEND_ERRORS as failure:
            _log.warning("expired job not ended", extra=log_fields(request) | {"error": repr(failure)})
            return False
        if is_first:
            _log.info("job expired", extra=log_fields(request) | {"tenant": tenant, "model": model})
            await send_result(self._nats, request, payload)
        return True


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _time(text: str) -> datetime:
    """Read NATS's time, which has nine digits behind the point."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}+00:00")
