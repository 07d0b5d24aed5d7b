"""Background responses: the queued response, whole, or a stream that follows its job.

The job does not depend on the answer: a client that leaves finds the response again by its id. The events of a response
depend on its text alone, so a client that lost its stream goes on with any gateway after the last event that it has
seen, and after each event the same one follows.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec

from gateway.admission.caller import Caller
from gateway.admission.limits import reserved_tokens
from gateway.api.answer import Answer, Asked, EventAnswer, Outcome, StreamParts
from gateway.api.sequences import wire_requests
from gateway.errors import ApiError
from gateway.responses.draft import RESPONSES, EventWriter, ResponseGeneration, error_event, response_fields
from gateway.responses.job import BackgroundJob, JobReader, JobWatch, status_of
from gateway.responses.job_queue import JobState
from gateway.responses.log import ResponseLogError, ResponseRecord
from gateway.responses.output import ResponseOutput
from gateway.responses.store import ResponseStore, ended_response, job_of
from shared.background_tasks import BackgroundTasks
from shared.messages import BatchResult

FIRST_POLL_S = 0.1
LAST_POLL_S = 2.0
_GROWTH = 1.3
_KEEP_ALIVE_S = 10.0
_EVENTS_AT_ONCE = 1000
# A NATS server that is replaced, or elects a leader, is back by then.
OUTAGE_S = 20.0


class BackgroundStream:
    """Yields the events of one response of a tenant after `starting_after`. Its stream was counted before."""

    def __init__(
        self,
        record: ResponseRecord,
        store: ResponseStore,
        starting_after: int = -1,
        watch: JobWatch | None = None,
        *,
        has_ids: bool = False,
    ) -> None:
        """Follow the job of `record`.

        Args:
            record: The response.
            store: Where it is kept.
            starting_after: Number of the last event that the client has.
            watch: Has heard of the job since it was published; made if not given.
            has_ids: Each event has its number as its id, as in `/v1/streams`.
        """
        ref = job_of(record)
        assert ref is not None
        self.tenant = record.tenant
        self._record = record
        self._ref = ref
        self._store = store
        self._cut: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._unsent: deque[bytes] = deque()
        self._events = EventWriter(self._unsent.append, starting_after, has_ids=has_ids)
        # OpenAI's libraries take the empty line behind a comment for the end of an event once they have seen an id.
        self._keep_alive = RESPONSES.keep_alive[:-1] if has_ids else RESPONSES.keep_alive
        self._output = ResponseOutput(record.draft, self._events.emit, store.seal_of(record.tenant, record.model))
        self._reader = JobReader(ref.job.reading, self._output)
        self._watch = watch
        self._starting_after = starting_after
        self._is_running = False
        self._away_since: float | None = None

    def cut(self, error: ApiError) -> None:
        """End the stream, not the job, with an error."""
        if not self._cut.done():
            self._cut.set_result(error)

    async def events(self) -> AsyncIterator[bytes]:
        """Tell the events as they come, the last of which ends the response, and comments in long silence."""
        queued = response_fields(self._record.draft, "queued")
        self._events.emit("response.created", {"response": queued})
        self._events.emit("response.queued", {"response": queued})
        wait_s, silent_s = FIRST_POLL_S, 0.0
        watch = self._watch or await self._store.jobs.watch(self.tenant, self._record.draft.id)
        try:
            while not await self._is_over(watch):
                if self._unsent:
                    # Recent output is likely to be followed by more.
                    wait_s, silent_s = FIRST_POLL_S, 0.0
                else:
                    wait_s, silent_s = min(wait_s * _GROWTH, LAST_POLL_S), silent_s + wait_s
                if silent_s > _KEEP_ALIVE_S:
                    self._unsent.append(self._keep_alive)
                    silent_s = 0.0
                while self._unsent:
                    yield self._take()
                    await asyncio.sleep(0)
                # Heard updates need no poll, but some may be missed.
                await self._wait(watch, LAST_POLL_S if watch.has_heard else wait_s)
        except ApiError as error:
            self._unsent.append(error_event(error, max(self._events.num_events - 1, self._starting_after)))
        finally:
            await self._store.jobs.unwatch(watch)
        while self._unsent:
            yield self._take()
            await asyncio.sleep(0)

    async def _wait(self, watch: JobWatch, wait_s: float) -> None:
        events: list[asyncio.Future[Any]] = [self._cut, watch.changed]
        await asyncio.wait(events, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if self._cut.done():
            raise self._cut.result()

    async def _is_over(self, watch: JobWatch) -> bool:
        """Report the new text; return whether the job has ended. NATS may be away for `OUTAGE_S`."""
        try:
            is_over = await self._advance(watch)
        except ApiError as error:
            now = asyncio.get_running_loop().time()
            if self._away_since is None:
                self._away_since = now
            if error.status != 503 or now - self._away_since >= OUTAGE_S:
                raise
            return False
        self._away_since = None
        return is_over

    async def _advance(self, watch: JobWatch) -> bool:
        """Report the new text; return whether the job has ended."""
        heard = watch.take(self._ref.job.stream_seq)
        if heard is not None:
            state = JobState(True, heard.text, heard.in_reasoning)
        else:
            result = await self._store.jobs.result(self._ref)
            if result is not None:
                await self._store.read_text(self.tenant, len(result.text), partial(self._end, result))
                return True
            state = await self._store.jobs.state(self._ref)
        if state.is_running:
            self._run()
            read = partial(self._read, state.text, state.in_reasoning)
            await self._store.read_text(self.tenant, len(state.text) - len(self._reader.text), read)
        return False

    def _run(self) -> None:
        if not self._is_running:
            self._is_running = True
            response = response_fields(self._record.draft, "in_progress")
            self._events.emit("response.in_progress", {"response": response})

    def _end(self, result: BatchResult) -> None:
        self._run()
        self._read(result.text, result.in_reasoning)
        self._reader.finish(is_complete=status_of(result) == "completed")
        self._events.end(ended_response(self._record, result, self._reader, self._output))

    def _read(self, text: str, in_reasoning: bool) -> None:
        if not self._reader.read(text, in_reasoning=in_reasoning):
            message = "The response was recomputed and no longer begins with the text already sent. Retrieve it whole."
            raise ApiError(500, message, code="response_restarted")

    def _take(self) -> bytes:
        """Return the next events, a bounded number: joining all events of a long text takes 50 ms."""
        return b"".join(self._unsent.popleft() for _ in range(min(_EVENTS_AT_ONCE, len(self._unsent))))


_log = logging.getLogger(__name__)

# Default time of a job; a request may ask for a day at most.
DEFAULT_TIMEOUT_S = 86_400.0


async def submit_job(
    store: ResponseStore, generation: ResponseGeneration, caller: Caller
) -> tuple[ResponseRecord, JobWatch | None]:
    """Queue a job and log its response; return both, and the job's watch if its stream is asked for."""
    draft, jobs = generation.draft, store.jobs
    timeout_s = generation.timeout_s or DEFAULT_TIMEOUT_S
    now = jobs.clock.now()
    (request,) = wire_requests(generation, caller, "", timeout_s, now)
    request = msgspec.structs.replace(
        request, id=draft.id, lane="batch", reply=None, is_followed=generation.stream, is_background=True
    )
    # A worker may have written the first text before the response is in the log.
    watch = await jobs.watch(caller.tenant, draft.id) if generation.stream else None
    try:
        job = BackgroundJob.of(generation, await jobs.publish(request), now + timeout_s)
        response = msgspec.json.encode(response_fields(draft, "queued"))
        served = None if generation.alias is None else generation.model
        record = ResponseRecord(caller.tenant, generation.name, draft, response, job, served)
        await _store_or_cancel(store, record)
        return record, watch
    except BaseException:
        if watch is not None:
            await jobs.unwatch(watch)
        raise


async def _store_or_cancel(store: ResponseStore, record: ResponseRecord) -> None:
    try:
        await store.log.put(record)
    except ResponseLogError as error:
        ref = job_of(record)
        assert ref is not None
        await store.jobs.cancel(ref)
        message = "The response cannot be stored at the moment, so it is not computed in the background."
        raise ApiError(503, message, code="response_log_unavailable", retry_after_s=5.0) from error


class BackgroundAnswer(Answer):
    """Base of both kinds of answers. There is no sequence here: the tokens go into the job's result."""

    def __init__(self, asked: Asked, *parts: StreamParts) -> None:
        super().__init__(asked, *parts)
        self._num_reserved = reserved_tokens(asked.generation)[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that the job may use, since its use is not counted later."""
        return self._num_reserved

    @abstractmethod
    def queued(self, record: ResponseRecord, watch: JobWatch | None) -> None:
        """Tell the client that its response is queued; `watch` is there for a stream."""

    def _complete(self) -> None:
        raise AssertionError("a job has no sequence that could end here")


class QueuedResponse(BackgroundAnswer):
    """The queued response as one JSON body."""

    def queued(self, record: ResponseRecord, watch: JobWatch | None) -> None:
        """Answer."""
        if not self.done.done():
            self._respond(record.response)
            self.end(Outcome.COMPLETED)


class FollowedResponse(BackgroundAnswer, EventAnswer):
    """The events of a response, from its queuing to its end."""

    def __init__(self, asked: Asked, store: ResponseStore, parts: StreamParts) -> None:
        super().__init__(asked, parts)
        self.tenant = asked.principal.tenant
        self._store = store
        self._tasks = BackgroundTasks()
        self._follower: BackgroundStream | None = None
        self._cut: ApiError | None = None

    def cut(self, error: ApiError) -> None:
        """End the stream, not the job, with an error; if the job is not queued yet, once the client knows its id."""
        self._cut = error
        if self._follower is not None:
            self._follower.cut(error)

    def queued(self, record: ResponseRecord, watch: JobWatch | None) -> None:
        """Begin to follow."""
        self._follower = BackgroundStream(record, self._store, watch=watch)
        if self._cut is not None:
            self._follower.cut(self._cut)
        following = self._tasks.spawn(self._follow(self._follower, record.draft.id))
        self.done.add_done_callback(lambda _: following.cancel())

    def close(self) -> None:
        """Let go of what refers back to the answer, and count its stream no longer. Every answer is closed."""
        super().close()
        self._store.remove_follower(self)

    async def _follow(self, follower: BackgroundStream, response_id: str) -> None:
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
