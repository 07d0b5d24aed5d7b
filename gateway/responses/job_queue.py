"""The jobs of background responses on NATS: published, looked for, watched, cancelled.

Everything that a job has is where every gateway finds it: its request in the tenant's stream, what it has so far in the
record of its progress, and its result in the stream of results.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from nats.errors import MaxPayloadError
from nats.js.errors import APIError, NoStreamResponseError

from gateway.errors import ApiError
from gateway.responses.job import BackgroundJob, JobWatch
from shared.batch_progress import BatchProgress
from shared.batch_streams import batch_stream
from shared.consumers import consumer_name
from shared.direct_client import DirectClient
from shared.kept_results import JobEnd, KeptResults
from shared.messages import BatchResult, Cancel, Request, encode, encode_request
from shared.nats_connection import SEND_ERRORS
from shared.publication import last_message
from shared.result_shares import ResultShares
from shared.server_clock import ServerClock
from shared.streams import PROGRESS_STREAM
from shared.subjects import cancel_subject, progress_subject, request_subject, result_subject

_TIMEOUT_S = 3.0
# A worker that is asked to end a job stores its result within this time; a dead one never does.
_WORKER_ANSWERS_S = 2.0
_ASK_EVERY_S = 0.5
# A worker may be about to store a result when the time of its job is over.
_GRACE_S = 60.0
_ERRORS: tuple[type[Exception], ...] = (APIError, *SEND_ERRORS)

MAX_WATCHES = 256
"""Jobs watched at once, each with two of the 1,000 subscriptions that NATS allows a connection; others are polled."""


@dataclass(frozen=True, slots=True)
class JobRef:
    """Which job is meant."""

    tenant: str
    model: str
    response_id: str
    job: BackgroundJob

    def result(self, finish: Literal["cancelled", "expired"], text: str = "", **more: Any) -> BatchResult:
        """Return the result of a job that ends with this text."""
        return BatchResult(id=self.response_id, model=self.model, tenant=self.tenant, text=text, finish=finish, **more)


@dataclass(frozen=True, slots=True)
class JobState:
    """A job that has not ended: whether a worker has taken it, and its text so far."""

    is_running: bool
    text: str = ""
    in_reasoning: bool = False


class JobQueue:
    """Publishes, reads and cancels jobs. Where NATS does not answer, methods raise an `ApiError` 503.

    Attributes:
        clock: NATS's own.
        kept: Stores the results of cancelled jobs.
    """

    def __init__(self, nats: DirectClient, clock: ServerClock) -> None:
        self._nats = nats
        self._num_watches = 0
        self.clock = clock
        self._js = nats.jetstream(timeout=_TIMEOUT_S)
        self.kept = KeptResults(self._js, ResultShares(self._js, can_purge=False, clock=self.clock))
        self._decode_result = msgspec.json.Decoder(BatchResult).decode
        self._decode_progress = msgspec.msgpack.Decoder(BatchProgress).decode

    async def publish(self, request: Request) -> int:
        """Queue a request, and return its number. `ApiError` 400 without a queue, 413 if too large, 503 if full."""
        subject = request_subject(request.model, "background", request.tenant)
        try:
            ack = await self._js.publish(subject, encode_request(request), headers={"Nats-Msg-Id": request.id})
        except NoStreamResponseError as error:
            message = (
                "This tenant has no batch queue for background responses. The operator makes it: `headrace setup`."
            )
            raise ApiError(400, message, param="background", code="background_unavailable") from error
        except MaxPayloadError as error:
            message = f"The conversation is larger than {self._nats.max_payload} bytes."
            raise ApiError(413, message, code="request_too_large") from error
        except APIError as error:
            message = "The batch queue of this tenant is full. Try again later."
            raise ApiError(503, message, code="queue_full", retry_after_s=30.0) from error
        except SEND_ERRORS as error:
            raise _unavailable() from error
        return ack.seq

    async def watch(self, tenant: str, response_id: str) -> JobWatch:
        """Hear of a job from now on, until `unwatch`; nothing is heard of more than `MAX_WATCHES` at once."""
        watch = JobWatch()
        if self._num_watches < MAX_WATCHES:
            self._num_watches += 1
            try:
                await watch.start(self._nats, tenant, response_id)
            except BaseException:
                await watch.close()
                self._num_watches -= 1
                raise
            self._num_watches -= not watch.is_subscribed
        return watch

    async def unwatch(self, watch: JobWatch) -> None:
        """Hear of a job no more; does nothing the second time."""
        self._num_watches -= watch.is_subscribed
        await watch.close()

    async def result(self, ref: JobRef) -> BatchResult | None:
        """Return the result of a job, None while it has none; `ApiError` 410 if it is no longer kept."""
        with _answering():
            found = await self.kept.result(ref.tenant, ref.response_id)
        if isinstance(found, JobEnd):
            raise _no_longer_kept(ref.response_id, found)
        if found is not None:
            return self._decode_result(found)
        # Its deadline has passed, although no worker recorded its end.
        return ref.result("expired") if self.clock.now() > ref.job.deadline + _GRACE_S else None

    async def state(self, ref: JobRef) -> JobState:
        """Return the state of a job without a result."""
        with _answering(), contextlib.suppress(msgspec.MsgspecError):
            message = await last_message(self._js, PROGRESS_STREAM, progress_subject(ref.tenant, ref.response_id))
            progress = None if message is None else self._decode_progress(message.data or b"")
            if progress is not None and progress.stream_seq == ref.job.stream_seq:
                return JobState(True, progress.text, progress.in_reasoning)
        return JobState(await self._is_taken(ref))

    async def cancel(self, ref: JobRef) -> None:
        """End a job with its output so far, unless it has ended.

        Its worker is asked first: only the worker knows the whole text. If it does not answer, the job ends with its
        last recorded progress.
        """
        state = await self.state(ref)
        if state.is_running:
            if await self._end_at_worker(ref):
                return
            state = await self.state(ref)
        told = {"in_reasoning": state.in_reasoning, "attempt": 0, "completed": self.clock.now()}
        result = ref.result("cancelled", state.text, **told)
        with _answering():
            is_first = await self.kept.store(ref.tenant, ref.response_id, msgspec.json.encode(result), "cancelled")
        if is_first:  # else it has just ended
            await self._withdraw(ref)

    async def forget(self, ref: JobRef) -> None:
        """Delete a job's output, once its response has been deleted."""
        await self.cancel(ref)
        empty, progress = msgspec.json.encode(ref.result("cancelled")), BatchProgress(b"", 0, "", 0)
        with _answering():
            await self._js.publish(result_subject(ref.tenant, ref.response_id), empty)
            await self._js.publish(progress_subject(ref.tenant, ref.response_id), msgspec.msgpack.encode(progress))

    async def _end_at_worker(self, ref: JobRef) -> bool:
        """Have the worker that has a job end it; False if it has not ended after some time."""
        watch = await self.watch(ref.tenant, ref.response_id)
        deadline, ask_at = time.monotonic() + _WORKER_ANSWERS_S, 0.0
        try:
            while await self.kept.result(ref.tenant, ref.response_id) is None:
                now = time.monotonic()
                if now >= deadline:
                    return False
                if now >= ask_at:
                    self._ask_to_end(ref)
                    ask_at = now + _ASK_EVERY_S
                await asyncio.wait([watch.changed], timeout=_ASK_EVERY_S)
                watch.take(ref.job.stream_seq)
        except _ERRORS as error:
            raise _unavailable() from error
        finally:
            await self.unwatch(watch)
        return True

    async def _withdraw(self, ref: JobRef) -> None:
        """Remove a job from the queue, and cancel it at a worker that took it meanwhile and would compute in vain."""
        with contextlib.suppress(*_ERRORS):
            await self._js.delete_msg(batch_stream(ref.tenant), ref.job.stream_seq)
        with contextlib.suppress(*SEND_ERRORS):
            self._ask_to_end(ref)

    def _ask_to_end(self, ref: JobRef) -> None:
        self._nats.send(cancel_subject(ref.model), encode(Cancel((ref.response_id,), tenant=ref.tenant)))

    async def _is_taken(self, ref: JobRef) -> bool:
        subject = f"$JS.API.CONSUMER.INFO.{batch_stream(ref.tenant)}.{consumer_name(ref.model, 'background')}"
        with _answering():
            info = msgspec.json.decode((await self._nats.request(subject, timeout=_TIMEOUT_S)).data)
        # Where there is no consumer, nothing is delivered.
        return bool(info.get("delivered", {}).get("stream_seq", 0) >= ref.job.stream_seq)


def _no_longer_kept(response_id: str, end: JobEnd) -> ApiError:
    when = datetime.fromtimestamp(end.ended, UTC).isoformat(timespec="seconds")
    message = (
        f"Response with id '{response_id}' ended ({end.finish}) at {when}, and its output is no longer kept. Outputs "
        "are dropped after their time, or earlier when this tenant stores more than its share. Make it again."
    )
    return ApiError(410, message, code="response_expired")


def _unavailable() -> ApiError:
    message = "The queue of background responses does not answer at the moment. Try again shortly."
    return ApiError(503, message, code="queue_unavailable", retry_after_s=2.0)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise _unavailable() from error
