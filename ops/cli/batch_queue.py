"""An administrator's side of a tenant's batch queue: read the jobs that have not ended, and cancel them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import StreamState
from nats.js.errors import APIError, NotFoundError

from gpu_worker.consumer.queued_message import UnreadableRequestError, read_request
from gpu_worker.consumer.result_store import send_result
from ops.cli.running_system import delete_message
from shared.batch_progress import BatchProgress
from shared.batch_streams import batch_stream
from shared.consumers import consumer_name
from shared.errors import DependencyError, HeadraceError, InvalidNameError
from shared.kept_results import KeptResults
from shared.messages import UNDECODABLE, BatchResult, Cancel, FinishReason, Request, encode
from shared.result_shares import ResultShares
from shared.server_clock import ServerClock
from shared.streams import PROGRESS_STREAM, RESULTS_STREAM
from shared.subjects import Queue, cancel_subject, decode_name, encode_name, progress_subject, result_subject

_WORKERS_ANSWER_S = 2.0
# A job may be handed from one worker to another while it is asked for.
_ASK_EVERY_S = 0.5
_LOOK_EVERY_S = 0.02
_IDS_AT_ONCE = 500


class RefusedCancelError(HeadraceError):
    """NATS refused to cancel one job."""

    def __init__(self, job_id: str, reason: str) -> None:
        super().__init__(f"job {job_id!r} could not be cancelled: {reason}")


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job of a tenant's stream, where it lies until it has ended; `queued` is in Unix seconds by NATS's clock."""

    seq: int
    request: Request
    queue: Queue
    queued: float

    @property
    def consumer(self) -> str:
        """The name of the consumer through which workers take it."""
        return consumer_name(self.request.model, self.queue)


class BatchQueue:
    """Works on one tenant's queue as an administrator. Methods raise `DependencyError` where NATS does not answer."""

    def __init__(self, nats: Client, tenant: str, clock: ServerClock) -> None:
        self._nats = nats
        self._js = nats.jetstream()
        self._tenant = tenant
        self._stream = batch_stream(tenant)
        self._clock = clock
        self._shares = ResultShares(self._js, can_purge=False, clock=clock)
        self._kept = KeptResults(self._js, self._shares)
        self._decode_progress = msgspec.msgpack.Decoder(BatchProgress).decode
        self._decode_result = msgspec.json.Decoder(BatchResult).decode

    async def jobs(self, model: str | None) -> AsyncIterator[QueuedJob]:
        """Yield the jobs that have not ended, oldest first; one that cannot be read is left out."""
        last = (await self._state(None)).last_seq
        seq, subject = 0, self._subjects(model)
        while seq < last:
            try:
                message = await self._js.get_msg(self._stream, seq=seq + 1, subject=subject, next=True)
            except NotFoundError:
                return
            except (APIError, NatsError) as error:
                raise self._unreadable(error) from error
            assert message.seq is not None
            assert message.time is not None
            seq = message.seq
            with contextlib.suppress(UnreadableRequestError, InvalidNameError):
                request = read_request(message.data or b"")
                _, _, encoded, queue, _ = (message.subject or "").split(".")
                named = msgspec.structs.replace(request, model=decode_name(encoded), tenant=self._tenant)
                named_queue: Queue = "background" if queue == "background" else "batch"
                yield QueuedJob(seq, named, named_queue, message.time.timestamp())

    async def count(self, model: str | None) -> int:
        """Return how many jobs have not ended."""
        return sum(((await self._state(self._subjects(model))).subjects or {}).values())

    def _subjects(self, model: str | None) -> str:
        # Both queues of the stream: a background response is a job, too.
        return f"hr.req.{'*' if model is None else encode_name(model)}.*.{encode_name(self._tenant)}"

    async def _state(self, subjects: str | None) -> StreamState:
        try:
            return (await self._js.stream_info(self._stream, subjects_filter=subjects)).state
        except NotFoundError:
            raise DependencyError(f"tenant {self._tenant!r} has no batch queue") from None
        except (APIError, NatsError) as error:
            raise self._unreadable(error) from error

    async def parted(self, jobs: Sequence[QueuedJob]) -> tuple[list[QueuedJob], list[QueuedJob]]:
        """Return those of the jobs that no worker has taken yet, and the others; some of these may be given back."""
        last = await self.last_taken({job.consumer for job in jobs})
        waiting = [job for job in jobs if job.seq > last[job.consumer]]
        return waiting, [job for job in jobs if job.seq <= last[job.consumer]]

    async def last_taken(self, consumers: Iterable[str]) -> dict[str, int]:
        """Return by consumer the number of the last job that a worker has taken through it, 0 if there is none."""
        last = dict.fromkeys(consumers, 0)
        try:
            for name in last:
                with contextlib.suppress(NotFoundError):
                    delivered = (await self._js.consumer_info(self._stream, name)).delivered
                    last[name] = 0 if delivered is None else delivered.stream_seq
        except (APIError, NatsError) as error:
            raise self._unreadable(error) from error
        return last

    async def ask_workers(self, jobs: Sequence[QueuedJob]) -> None:
        """Have workers end the jobs that they hold, with all they have, and give them some time for it."""
        missing = deque(jobs)
        deadline, ask_at = time.monotonic() + _WORKERS_ANSWER_S, 0.0
        try:
            while missing and (now := time.monotonic()) < deadline:
                if await self._finish(missing[0]) is not None:
                    missing.popleft()
                    continue
                if now >= ask_at:
                    await self._ask(missing)
                    ask_at = now + _ASK_EVERY_S
                await asyncio.sleep(_LOOK_EVERY_S)
        except (APIError, NatsError, OSError) as error:
            raise DependencyError(f"workers could not be asked to end their jobs: {_reason(error)}") from error

    async def _ask(self, jobs: Iterable[QueuedJob]) -> None:
        by_model: dict[str, list[str]] = {}
        for job in jobs:
            by_model.setdefault(job.request.model, []).append(job.request.id)
        for model, ids in by_model.items():
            for start in range(0, len(ids), _IDS_AT_ONCE):
                ask = Cancel(tuple(ids[start : start + _IDS_AT_ONCE]), tenant=self._tenant)
                await self._nats.publish(cancel_subject(model), encode(ask))

    async def cancel(self, job: QueuedJob) -> bool:
        """End a job; False if it has just ended otherwise. If no worker ends it, it keeps its last saved progress.

        Raises:
            RefusedCancelError: NATS refuses; other jobs may still be cancelled.
        """
        request = job.request
        try:
            if (ended := await self._finish(job)) is not None:
                if ended == "cancelled":
                    await delete_message(self._js, self._stream, job.seq)
                return ended == "cancelled"
            payload = msgspec.json.encode(self._result(request, await self._progress(job)))
            if not await self._kept.store(request.tenant, request.id, payload, "cancelled"):
                return await self._finish(job) == "cancelled"
            # A worker may have taken it meanwhile: it would compute in vain, and the next one would take it.
            late = Cancel((request.id,), tenant=self._tenant)
            await self._nats.publish(cancel_subject(request.model), encode(late))
            await delete_message(self._js, self._stream, job.seq)
            await send_result(self._nats, request, payload)
        except APIError as error:
            raise RefusedCancelError(request.id, _reason(error)) from error
        except (NatsError, OSError) as error:
            raise DependencyError(f"job {request.id!r} could not be cancelled: {_reason(error)}") from error
        return True

    async def close(self) -> None:
        """Record the results' use of the tenant's share."""
        await self._shares.close()

    def _unreadable(self, error: Exception) -> DependencyError:
        return DependencyError(f"the queue of tenant {self._tenant!r} cannot be read: {_reason(error)}")

    async def _finish(self, job: QueuedJob) -> FinishReason | None:
        try:
            message = await self._js.get_last_msg(RESULTS_STREAM, result_subject(self._tenant, job.request.id))
            return self._decode_result(message.data or b"").finish
        except (NotFoundError, *UNDECODABLE):
            return None

    def _result(self, request: Request, progress: BatchProgress | None) -> BatchResult:
        token_ids = () if progress is None else progress.token_ids
        return BatchResult(
            id=request.id,
            model=request.model,
            tenant=request.tenant,
            text="" if progress is None else progress.text,
            finish="cancelled",
            token_ids=token_ids,
            completion_tokens=len(token_ids),
            error="cancelled by an operator",
            attempt=0,
            created=request.created,
            completed=self._clock.now(),
            in_reasoning=progress is not None and progress.in_reasoning,
        )

    async def _progress(self, job: QueuedJob) -> BatchProgress | None:
        subject = progress_subject(job.request.tenant, job.request.id)
        try:
            message = await self._js.get_last_msg(PROGRESS_STREAM, subject)
            progress = self._decode_progress(message.data or b"")
        except (NotFoundError, *UNDECODABLE):
            return None
        return progress if progress.stream_seq == job.seq else None


def _reason(error: Exception) -> str:
    return (isinstance(error, APIError) and error.description) or repr(error)
