"""The responses that can be read: from the log, and with what their jobs have come to meanwhile.

Of its own it keeps only who follows a job in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gateway.errors import ApiError
from gateway.responses.draft import response_fields
from gateway.responses.job import JobReader, error_of, status_of
from gateway.responses.job_queue import JobQueue, JobRef
from gateway.responses.log import PieceBudget, ResponseLog
from gateway.responses.output import ResponseOutput
from gateway.responses.record import ResponseRecord, has_ended
from shared.messages import BatchResult


class Following(Protocol):
    """A stream of this process that follows a job."""

    def cut(self, error: ApiError) -> None:
        """End the stream with an error."""


class ResponseStore:
    """Reads, writes and deletes responses of a tenant.

    Attributes:
        followers: The streams that follow a job; they add and remove themselves.
    """

    def __init__(self, log: ResponseLog, jobs: JobQueue) -> None:
        """Work with these."""
        self.log = log
        self.jobs = jobs
        self.followers: set[Following] = set()

    def cut_followers(self, error: ApiError) -> None:
        """End all streams that follow a job. Their clients go on with another gateway."""
        for follower in list(self.followers):
            follower.cut(error)

    async def get(self, tenant: str, response_id: str, budget: PieceBudget | None = None) -> ResponseRecord | None:
        """Return a response as it is now, or None if there is none; see `ResponseLog.get`.

        Raises:
            ApiError: 503, NATS does not answer; 400, the budget does not suffice.
        """
        record = await self.log.get(tenant, response_id, budget)
        return None if record is None else await self._current(record)

    async def get_all(
        self, tenant: str, response_ids: Sequence[str], budget: PieceBudget
    ) -> list[ResponseRecord | None]:
        """Return several responses as they are now, None for each that is not there.

        Raises:
            ApiError: As for `get`.
        """
        return list(await asyncio.gather(*(self.get(tenant, response_id, budget) for response_id in response_ids)))

    async def cancel(self, record: ResponseRecord) -> ResponseRecord:
        """End a background response unless it has ended, and return it as it is then.

        Raises:
            ApiError: 503; NATS does not answer.
        """
        ref = job_of(record)
        if ref is not None and not has_ended(record):
            await self.jobs.cancel(ref)
            record = await self._current(record)
        return record

    async def delete(self, record: ResponseRecord) -> None:
        """Forget a response; one that is still computed is cancelled.

        Raises:
            ApiError: 503; NATS does not answer.
        """
        await self.log.delete(record.tenant, record.draft.id)
        ref = job_of(record)
        if ref is not None:
            await self.jobs.forget(ref)

    async def _current(self, record: ResponseRecord) -> ResponseRecord:
        ref = job_of(record)
        if ref is None:
            return record
        result = await self.jobs.result(ref)
        if result is None:
            is_running = (await self.jobs.state(ref)).is_running
            response = response_fields(record.draft, "in_progress" if is_running else "queued")
        else:
            response = ended_response(record, result)
        return msgspec.structs.replace(record, response=msgspec.json.encode(response))


def job_of(record: ResponseRecord) -> JobRef | None:
    """Return the job that computes a response, if one does."""
    job = record.job
    return None if job is None else JobRef(record.tenant, record.model, record.draft.id, job)


def ended_response(
    record: ResponseRecord, result: BatchResult, reader: JobReader | None = None, output: ResponseOutput | None = None
) -> dict[str, Any]:
    """Return a response whose job has ended; `reader` and `output` are those that have read its text, if any have."""
    assert record.job is not None
    draft, status = record.draft, status_of(result)
    if reader is None or output is None:
        output = ResponseOutput(draft)
        reader = read_result(record, result, output)
    has_usage = status in ("completed", "incomplete")
    return response_fields(
        draft,
        status,
        output.items,
        usage=reader.usage(result) if has_usage else None,
        error=error_of(result),
        completed_at=int(result.completed) if status == "completed" else None,
    )


def read_result(record: ResponseRecord, result: BatchResult, output: ResponseOutput) -> JobReader:
    """Read the whole text of a job."""
    assert record.job is not None
    reader = JobReader(record.job.reading, output)
    reader.read(result.text, in_reasoning=result.in_reasoning)
    reader.finish(is_complete=status_of(result) == "completed")
    return reader
