"""An administrator's side of a tenant's batch queue: read the jobs that have not ended, and cancel them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import APIError, NotFoundError

from gpu_worker.consumer.batch_result import send_result
from gpu_worker.consumer.unreadable import UnreadableRequestError, read_request
from shared.batch_progress import BatchProgress
from shared.batch_streams import batch_stream
from shared.errors import DependencyError, InvalidNameError
from shared.kept_results import KeptResults
from shared.messages import UNDECODABLE, BatchResult, Cancel, Request, encode
from shared.result_shares import ResultShares
from shared.streams import PROGRESS_STREAM
from shared.subjects import cancel_subject, decode_name, encode_name, progress_subject


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job and its number in the queue, where it lies until it has ended."""

    seq: int
    request: Request


class BatchQueue:
    """Works on one tenant's queue over a connection in the admin role."""

    def __init__(self, nats: Client, tenant: str) -> None:
        """Use an open connection."""
        self._nats = nats
        self._js = nats.jetstream()
        self._tenant = tenant
        self._stream = batch_stream(tenant)
        self._shares = ResultShares(self._js, can_purge=False)
        self._kept = KeptResults(self._js, self._shares)
        self._decode_progress = msgspec.msgpack.Decoder(BatchProgress).decode

    async def jobs(self, model: str | None) -> AsyncIterator[QueuedJob]:
        """Yield the jobs that have not ended, oldest first; one that cannot be read is left out.

        Raises:
            DependencyError: The tenant has no queue, or NATS does not answer.
        """
        # Both queues of the stream: a background response is a job, too.
        subject = f"hr.req.{'*' if model is None else encode_name(model)}.*.{encode_name(self._tenant)}"
        try:
            last = (await self._js.stream_info(self._stream)).state.last_seq
        except NotFoundError:
            raise DependencyError(f"tenant {self._tenant!r} has no batch queue") from None
        except (APIError, NatsError) as error:
            raise DependencyError(f"the queue of tenant {self._tenant!r} cannot be read: {error!r}") from error
        seq = 0
        while seq < last:
            try:
                message = await self._js.get_msg(self._stream, seq=seq + 1, subject=subject, next=True)
            except NotFoundError:
                return
            except (APIError, NatsError) as error:
                raise DependencyError(f"the queue of tenant {self._tenant!r} cannot be read: {error!r}") from error
            assert message.seq is not None
            seq = message.seq
            with contextlib.suppress(UnreadableRequestError, InvalidNameError):
                request = read_request(message.data or b"")
                name = decode_name((message.subject or "").split(".")[2])
                yield QueuedJob(seq, msgspec.structs.replace(request, model=name, tenant=self._tenant))

    async def cancel(self, job: QueuedJob) -> bool:
        """End a job with what it has; False if it has just ended.

        Raises:
            DependencyError: NATS does not answer, or refuses.
        """
        request = job.request
        progress = await self._progress(job)
        result = BatchResult(
            id=request.id,
            model=request.model,
            tenant=request.tenant,
            text="" if progress is None else progress.text,
            finish="cancelled",
            token_ids=() if progress is None else progress.token_ids,
            completion_tokens=0 if progress is None else len(progress.token_ids),
            error="cancelled by an operator",
            attempt=0,
            created=request.created,
            completed=time.time(),
            in_reasoning=progress is not None and progress.in_reasoning,
        )
        payload = msgspec.json.encode(result)
        try:
            if not await self._kept.store(request.tenant, request.id, payload, "cancelled"):
                return False
            # Its worker would compute in vain, and the next one would take it.
            await self._nats.publish(cancel_subject(request.model), encode(Cancel((request.id,))))
            with contextlib.suppress(NotFoundError):
                await self._js.delete_msg(self._stream, job.seq)
            await send_result(self._nats, request, payload)
        except (APIError, NatsError, OSError) as error:
            raise DependencyError(f"job {request.id!r} could not be cancelled: {error!r}") from error
        return True

    async def close(self) -> None:
        """Write down what the results take of the tenant's share."""
        await self._shares.close()

    async def _progress(self, job: QueuedJob) -> BatchProgress | None:
        subject = progress_subject(job.request.tenant, job.request.id)
        try:
            message = await self._js.get_last_msg(PROGRESS_STREAM, subject)
            progress = self._decode_progress(message.data or b"")
        except (NotFoundError, *UNDECODABLE):
            return None
        except (APIError, NatsError) as error:
            raise DependencyError(f"the progress of job {job.request.id!r} cannot be read: {error!r}") from error
        return progress if progress.stream_seq == job.seq else None
