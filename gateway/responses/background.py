"""Answers to requests for background responses: the queued response, whole, or a stream that follows the job.

The job does not depend on the answer: a client that leaves finds the response again by its id.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass

import msgspec

from gateway.admission.caller import Caller
from gateway.admission.limits import reserved_tokens
from gateway.api.answer import Answer, EventAnswer, Outcome
from gateway.api.endpoint import Asked, StreamParts
from gateway.api.sequences import wire_requests
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.responses.draft import ResponseGeneration, response_fields
from gateway.responses.follower import Follower
from gateway.responses.job import BackgroundJob, JobWatch
from gateway.responses.log import ResponseLogError, ResponseRecord
from gateway.responses.store import ResponseStore, job_of
from shared.background_tasks import BackgroundTasks
from shared.messages import Request

_log = logging.getLogger(__name__)

# Time for a job that names none; a day is what a request may ask for at most.
DEFAULT_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Submission:
    """Makes a job of a request."""

    store: ResponseStore

    async def submit(self, generation: ResponseGeneration, caller: Caller) -> tuple[ResponseRecord, JobWatch | None]:
        """Put a job into the queue, and its response into the log; both are on the disk when this returns.

        Returns:
            The response, and the watch of its job, if its stream is asked for.

        Raises:
            ApiError: The queue or the log does not take it.
        """
        draft = generation.draft
        timeout_s = generation.timeout_s or DEFAULT_TIMEOUT_S
        now = self.store.jobs.clock.now()
        names = (caller.request_id, caller.traceparent)
        (request,) = wire_requests(generation, caller.tenant, "", timeout_s, *names, now, caller.key_id)
        request = msgspec.structs.replace(
            request, id=draft.id, lane="batch", reply=None, is_followed=generation.stream, is_background=True
        )
        # A worker may have written the first text before the response is in the log.
        watch = await self.store.jobs.watch(caller.tenant, draft.id) if generation.stream else None
        try:
            return await self._submit(generation, caller, request, now + timeout_s), watch
        except BaseException:
            if watch is not None:
                await self.store.jobs.unwatch(watch)
            raise

    async def _submit(
        self, generation: ResponseGeneration, caller: Caller, request: Request, deadline: float
    ) -> ResponseRecord:
        draft = generation.draft
        jobs = self.store.jobs
        queue, stream_seq = await jobs.publish(request)
        job = BackgroundJob.of(generation, stream_seq, deadline, queue, jobs.first_piece)
        response = msgspec.json.encode(response_fields(draft, "queued"))
        record = ResponseRecord(caller.tenant, generation.model, draft, response, job)
        try:
            await self.store.log.put(record)
        except ResponseLogError as error:
            ref = job_of(record)
            assert ref is not None
            await self.store.jobs.cancel(ref)
            message = "The response cannot be stored at the moment, so it is not computed in the background."
            raise ApiError(503, message, code="response_log_unavailable", retry_after_s=5.0) from error
        return record


class BackgroundAnswer(Answer):
    """Base of both kinds of answers. There is no sequence here: the tokens go into the job's result."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the job may use, since its use is not counted later."""
        return self._num_reserved

    def reserve(self, generation: Generation) -> None:
        """Count what a generation may use."""
        self._num_reserved = reserved_tokens(generation)

    @abstractmethod
    def queued(self, record: ResponseRecord, watch: JobWatch | None) -> None:
        """Tell the client that its response is queued; `watch` is there for a stream."""

    def _complete(self) -> None:
        raise AssertionError("a job has no sequence that could end here")


class QueuedResponse(BackgroundAnswer):
    """The queued response as one JSON body."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked.exchange, asked.generation, asked.head)
        self.reserve(asked.generation)

    def queued(self, record: ResponseRecord, watch: JobWatch | None) -> None:
        """Answer."""
        if not self.done.done():
            self._respond(record.response)
            self.end(Outcome.COMPLETED)


class FollowedResponse(BackgroundAnswer, EventAnswer):
    """The events of a response, from its queuing to its end."""

    def __init__(self, asked: Asked, store: ResponseStore, parts: StreamParts) -> None:
        EventAnswer.__init__(self, asked.exchange, asked.generation, asked.head, parts.flusher, parts.limits, parts.now)
        self.reserve(asked.generation)
        self._tenant = asked.principal.tenant
        self._store = store
        self._tasks = BackgroundTasks()
        self._follower: Follower | None = None
        self._cut: ApiError | None = None

    @property
    def tenant(self) -> str:
        """Whose response it is."""
        return self._tenant

    def cut(self, error: ApiError) -> None:
        """End the stream, not the job, with an error; if the job is not queued yet, once the client knows its id."""
        self._cut = error
        if self._follower is not None:
            self._follower.cut(error)

    def queued(self, record: ResponseRecord, watch: JobWatch | None) -> None:
        """Begin to follow."""
        self._follower = Follower(record, self._store, watch=watch)
        if self._cut is not None:
            self._follower.cut(self._cut)
        following = self._tasks.spawn(self._follow(self._follower, record.draft.id))
        self.done.add_done_callback(lambda _: following.cancel())

    def close(self) -> None:
        """Let go of what refers back to the answer, and count its stream no longer. Every answer is closed."""
        super().close()
        self._store.remove_follower(self)

    async def _follow(self, follower: Follower, response_id: str) -> None:
        try:
            async for events in follower.events():
                self._stream.send_now(events)
        except Exception:
            _log.exception("a background response could not be followed", extra={"id": response_id})
            message = "The response could not be followed any more. It is computed all the same: retrieve it."
            self.fail(ApiError(500, message, code="internal_error"))
            return
        self._stream.end()
        self.end(Outcome.COMPLETED)
