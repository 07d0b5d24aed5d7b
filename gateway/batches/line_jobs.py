"""The jobs of a batch's lines in the batch lane: published, heard of, looked for, cancelled.

A job's id is that of its batch with the number of its line, so a driver that takes over publishes the same jobs.
Results are heard as they are stored; those that pass by while NATS or the driver is away are looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import MaxPayloadError
from nats.js.errors import APIError, NoStreamResponseError

from gateway.batches.input_lines import InputLine
from gateway.batches.line import BatchLine
from shared.direct_client import DirectClient
from shared.kept_results import JOB_ENDED, JobEnd, KeptResults
from shared.media import IMAGE_NOT_FOUND
from shared.messages import UNDECODABLE, BatchResult, Cancel, FinishReason, Request, encode, encode_request
from shared.nats_connection import SEND_ERRORS, unsubscribe
from shared.subjects import cancel_subject, request_subject, stored_filter

# A worker that is asked to end a job stores its result within this time.
_WORKERS_ANSWER_S = 2.0
_ASK_EVERY_S = 0.5
_IDS_AT_ONCE = 500
_TIMEOUT_S = 5.0
# A missing result is looked up after this time, at most `_LOOKED_AT_ONCE` at a time.
_LOOK_AFTER_S = 5.0
_LOOKED_AT_ONCE = 64
_CONCURRENT_CALLS = 32
# A batch may have 100,000 jobs: as many tasks that begin at once stop the event loop for seconds.
_TASKS_AT_ONCE = 128
# By why a job has to be named anew. Images are stored for half of `LINE_TTL_S` at least, an eighth of a batch's window.
_MAX_ATTEMPTS = {JOB_ENDED: 4, IMAGE_NOT_FOUND: 8}
_ERRORS: tuple[type[Exception], ...] = (APIError, NoStreamResponseError, *SEND_ERRORS)


class QueueFullError(Exception):
    """The tenant's queue takes no more now, or NATS does not answer."""


@dataclass(slots=True)
class SentLine:
    """A line whose results have not all come.

    Attributes:
        place: Where it stands in the file.
        line: Without its prompts, once it is published.
        attempt: How often its jobs were renamed, because a job of their id had ended whose result is not kept.
        ids: The ids of its jobs.
    """

    place: InputLine
    line: BatchLine
    attempt: int
    ids: frozenset[str]
    looked_at: float = field(default_factory=time.monotonic)


class LineJobs:
    """The jobs of one batch that are in the queue. Use as `async with`."""

    def __init__(self, nats: DirectClient, kept: KeptResults, tenant: str, batch_id: str) -> None:
        self._nats = nats
        self._js = nats.jetstream(timeout=_TIMEOUT_S)
        self._kept = kept
        self._tenant = tenant
        self._batch_id = batch_id
        self._sent: dict[str, SentLine] = {}
        self._heard: deque[bytes] = deque()
        # While jobs end: those that have a result, and how many of those heard were read for it.
        self._ended: set[str] = set()
        self._num_read = 0
        self._has_heard = asyncio.Event()
        self._subscription: Subscription | None = None
        self._num_reconnects = nats.stats["reconnects"]
        self._calls = asyncio.Semaphore(_CONCURRENT_CALLS)
        self._decode = msgspec.json.Decoder(BatchResult).decode
        self.num_jobs = 0
        self.num_bytes = 0

    async def __aenter__(self) -> LineJobs:
        with contextlib.suppress(*SEND_ERRORS):
            self._subscription = await self._nats.subscribe_direct(stored_filter(self._tenant), self._hear)
        return self

    async def __aexit__(self, *_: object) -> None:
        await unsubscribe(self._subscription)

    def prefix(self, line: int, attempt: int = 0) -> str:
        """Return the prefix of the ids of a line's jobs."""
        return f"{self._batch_id}-{line}{f'r{attempt}' if attempt else ''}"

    @property
    def lines(self) -> list[SentLine]:
        """The lines whose results have not all come."""
        return list(self._sent.values())

    def note(self, place: InputLine, line: BatchLine, attempt: int = 0) -> SentLine:
        """Wait for the results of a line whose jobs are in the queue, or will be."""
        ids = frozenset(request.id for request in line.requests)
        sent = SentLine(place._replace(data=b""), line.without_prompts(), attempt, ids)
        self._sent[self.prefix(place.number, attempt)] = sent
        self.num_jobs += len(line.requests)
        self.num_bytes += place.end - place.start
        return sent

    async def publish(self, line: BatchLine) -> None:
        """Publish a line's jobs, again without harm; `QueueFullError`, or `MaxPayloadError` if one is too large."""
        for request in line.requests:
            subject = request_subject(request.model, "batch", request.tenant)
            async with self._calls:
                try:
                    await self._js.publish(subject, encode_request(request), headers={"Nats-Msg-Id": request.id})
                except MaxPayloadError:
                    raise
                except _ERRORS as error:
                    raise QueueFullError(repr(error)) from error

    async def find(self, sent: SentLine) -> bool:
        """Look for the results of a line that another driver may have published; return whether all are there."""
        try:
            return await self._look_for(sent.line.requests)
        except _ERRORS:
            return False

    async def wait(self, timeout_s: float) -> None:
        """Wait until something was heard."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_heard.wait()

    async def look(self, *, for_all: bool = False) -> None:
        """Look for results that were not heard: of all jobs after NATS was away, else of some of the oldest."""
        num_reconnects, now = self._nats.stats["reconnects"], time.monotonic()
        for_all |= num_reconnects != self._num_reconnects
        due = [each for each in self._sent.values() if for_all or now - each.looked_at >= _LOOK_AFTER_S]
        due = due if for_all else due[:_LOOKED_AT_ONCE]
        for each in due:
            each.looked_at = now
        try:
            missing = [each for sent in due for each in sent.line.requests if each.id not in sent.line.results]
            await self._look_for(missing, until_missing=False)
        except _ERRORS:
            return
        self._num_reconnects = num_reconnects

    async def _look_for(self, requests: list[Request], *, until_missing: bool = True) -> bool:
        """Look for results and return whether all are there; with `until_missing`, stop soon after one is not."""
        is_there = True
        for start in range(0, len(requests), _TASKS_AT_ONCE):
            is_there &= all(await asyncio.gather(*map(self._look, requests[start : start + _TASKS_AT_ONCE])))
            if until_missing and not is_there:
                break
        return is_there

    async def _look(self, request: Request) -> bool:
        async with self._calls:
            found = await self._kept.result(self._tenant, request.id)
        if found is not None:
            self._heard.append(msgspec.json.encode(_gone(request)) if isinstance(found, JobEnd) else found)
            self._has_heard.set()
        return found is not None

    def take(self) -> tuple[list[SentLine], list[SentLine]]:
        """Return the lines that are complete, and those whose jobs have to be named anew and published again."""
        complete, repeated = [], []
        self._has_heard.clear()
        while self._heard:
            try:
                result = self._decode(self._heard.popleft())
            except UNDECODABLE:
                continue
            sent = self._sent.get(result.id.rpartition("-")[0])
            if sent is None or result.id not in sent.ids:
                continue
            if sent.attempt + 1 < _MAX_ATTEMPTS.get(result.error_code or "", 0):
                repeated.append(self.forget(sent))
                continue
            sent.line.results[result.id] = result
            if sent.line.is_complete:
                complete.append(self.forget(sent))
        return complete, repeated

    async def end_all(self, finish: FinishReason, now: float) -> None:
        """End the jobs without a result: workers report the output so far of running ones, the others never start."""
        await self.look(for_all=True)
        self._ended, self._num_read = {each for sent in self._sent.values() for each in sent.line.results}, 0
        deadline, ask_at = time.monotonic() + _WORKERS_ANSWER_S, 0.0
        while (missing := self._missing()) and (at := time.monotonic()) < deadline:
            if at >= ask_at:
                self._ask_to_end(missing)
                ask_at = at + _ASK_EVERY_S
            await asyncio.sleep(_ASK_EVERY_S / 5)
        missing = self._missing()
        for start in range(0, len(missing), _TASKS_AT_ONCE):
            await asyncio.gather(*(self._end(each, finish, now) for each in missing[start : start + _TASKS_AT_ONCE]))

    def _missing(self) -> list[Request]:
        """Return the jobs without a result. Results are decoded once, however often this is asked while jobs end."""
        for data in itertools.islice(self._heard, self._num_read, None):
            with contextlib.suppress(*UNDECODABLE):
                self._ended.add(self._decode(data).id)
        self._num_read = len(self._heard)
        requests = (request for sent in self._sent.values() for request in sent.line.requests)
        return [request for request in requests if request.id not in self._ended]

    async def _end(self, request: Request, finish: FinishReason, now: float) -> None:
        result = BatchResult(
            id=request.id, model=request.model, tenant=self._tenant, text="", finish=finish, attempt=0, completed=now
        )
        payload = msgspec.json.encode(result)
        while True:
            try:
                async with self._calls:
                    is_first = await self._kept.store(self._tenant, request.id, payload, finish)
                    data = payload if is_first else await self._kept.stored(self._tenant, request.id) or payload
                break
            except _ERRORS:
                await asyncio.sleep(0.5)
        self._heard.append(data)
        self._has_heard.set()

    def _ask_to_end(self, requests: Iterable[Request]) -> None:
        by_model: defaultdict[str, list[str]] = defaultdict(list)
        for request in requests:
            by_model[request.model].append(request.id)
        with contextlib.suppress(*SEND_ERRORS):
            for model, ids in by_model.items():
                for start in range(0, len(ids), _IDS_AT_ONCE):
                    ask = Cancel(tuple(ids[start : start + _IDS_AT_ONCE]), tenant=self._tenant)
                    self._nats.send(cancel_subject(model), encode(ask))

    def forget(self, sent: SentLine) -> SentLine:
        """Wait for a line no more."""
        del self._sent[self.prefix(sent.place.number, sent.attempt)]
        self.num_jobs -= len(sent.line.requests)
        self.num_bytes -= sent.place.end - sent.place.start
        return sent

    def _hear(self, message: Msg) -> None:
        # Ids of batches have an underscore, which the subject shows as `_5f`.
        if self._batch_id.replace("_", "_5f") in message.subject:
            self._heard.append(message.data)
            self._has_heard.set()


def _gone(request: Request) -> BatchResult:
    return BatchResult(
        id=request.id, model=request.model, tenant=request.tenant, text="", finish="failed", error_code=JOB_ENDED
    )
