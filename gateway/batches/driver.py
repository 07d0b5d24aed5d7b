"""Drives one batch from its file to its files: checks the lines, has them computed, and writes their results.

Whatever dies, each line is answered once: what the record names is done, and everything else is done again under the
same names. A driver that was taken for dead finds that out when it next replaces the record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial

import msgspec
from nats.errors import MaxPayloadError

from gateway.batches.driver_services import DriverServices
from gateway.batches.input_lines import InputLine, input_lines, line_data, line_fields
from gateway.batches.lease import Lease, LostLeaseError
from gateway.batches.line import checked_id
from gateway.batches.line_answer import written_line
from gateway.batches.line_jobs import LineJobs, QueueFullError, SentLine
from gateway.batches.line_maker import INLINE_BYTES, LineMaker, NotReadyError
from gateway.batches.log import ERRORS
from gateway.batches.output import BatchOutput, delete_parts, patiently
from gateway.batches.record import ENDED, BatchError, bounded_errors
from gateway.batches.set_aside import SetAside
from gateway.batches.validation import InputCheck
from gateway.files.objects import FileRecord
from shared.errors import BadRequestError
from shared.log_limit import LogLimit
from shared.messages import FinishReason
from shared.objects.store import MissingObjectError

# In the queue at once, of one batch: enough for the batch seats of many workers, and little of the tenant's queue.
MAX_JOBS = 1024
MAX_JOB_BYTES = 32 << 20
_PUBLISHED_AT_ONCE = 32
_BYTES_AT_ONCE = 4 << 20
_TICK_S = 0.25
_FULL_S = 1.0
# The record names a number of lines before jobs of them are published, so that a successor knows of them.
_AHEAD = 1024

_MISSING = BatchError("input_file_missing", "The input file is no longer there.", "input_file_id")

_log = logging.getLogger(__name__)


class BatchDriver:
    """Drives the batch of a lease until it has ended or is another gateway's."""

    def __init__(self, services: DriverServices, lease: Lease) -> None:
        self._services = services
        self._lease = lease
        self.tenant = lease.record.tenant
        self._output = BatchOutput(services.catalog, lease)
        self._file: FileRecord | None = None
        self._aside = SetAside()
        self._log_limit = LogLimit(_log)
        self._maker = LineMaker(services, lease.record)
        self._jobs = LineJobs(services.nats, services.kept, lease.record.tenant, lease.record.id)
        self._read_to = lease.record.position
        # Jobs of the lines up to this one may have been published by another driver.
        self._sent_before = lease.record.num_sent
        # Of one line, of those that were published lately.
        self._most_jobs = 1
        # Lines of which some jobs are in the queue and others found no room.
        self._partly_sent = set[int]()

    async def run(self) -> None:
        """Drive."""
        try:
            async with self._lease.renewed():
                if self._lease.record.status not in ENDED:
                    await self._drive()
                await self._close()
        except* LostLeaseError:
            _log.info("batch left to another gateway", extra={"batch": self._lease.record.id})

    async def release(self) -> None:
        """Leave the batch to other gateways: this one stops."""
        await self._lease.release()

    async def _drive(self) -> None:
        record = self._lease.record
        find = partial(self._services.catalog.find, record.tenant, record.input_file_id)
        self._file = await patiently(self._services.catalog, find)
        if self._file is None:
            await self.fail(_MISSING)
            return
        try:
            if record.status == "validating":
                await self._validate(self._file)
            if record.ends_as != "failed":
                await self._compute()
        except MissingObjectError:
            await self._output.flush()
            record.errors, record.ends_as = [_MISSING], "failed"
        await self._finish()

    async def _validate(self, file: FileRecord) -> None:
        record, services = self._lease.record, self._services

        async def check() -> InputCheck:
            watermark, fleet = services.watermark_of(record.tenant, record.key), services.fleet
            settle = lambda generation: services.settled(generation, record.tenant)  # noqa: E731
            checking = InputCheck(record, services.max_line_bytes, fleet, watermark, settle)
            await checking.run(services.catalog, file, services.bodies)
            return checking

        checked = await patiently(self._services.catalog, check)
        record.total = checked.num_lines
        if checked.errors:
            record.errors, record.ends_as = bounded_errors(checked.errors), "failed"
        elif not self._lease.is_cancelled:
            record.enter("in_progress", services.clock.now())
        await self._lease.save()

    async def fail(self, error: BatchError) -> None:
        """End the batch with its results so far."""
        self._lease.record.errors, self._lease.record.ends_as = [error], "failed"
        await self._finish()

    async def _finish(self) -> None:
        record, now = self._lease.record, self._services.clock.now()
        if record.status == "in_progress" and record.ends_as != "failed":
            record.enter("finalizing", now)
            await self._lease.save()
        await self._output.finish(now)

    async def _close(self) -> None:
        record, services = self._lease.record, self._services
        await patiently(self._services.catalog, partial(delete_parts, services.catalog, record))
        while True:
            try:
                await services.log.end(record, self._lease.revision)
                return
            except ERRORS:
                await asyncio.sleep(_FULL_S)

    # What computes.

    async def _compute(self) -> None:
        lines = self._undone_lines()
        async with self._jobs:
            is_all_sent, waiting = False, list[InputLine]()
            while not (reason := self._must_end()) and not (is_all_sent and self._is_all_answered(waiting)):
                await self._publish_aside()
                is_all_sent = await self._fill(lines, waiting) or is_all_sent
                await self._jobs.wait(_TICK_S)
                await self._jobs.look()
                await self._take()
                if self._output.is_due:
                    await self._output.flush(self._position(waiting))
            if reason is not None:
                await self._end_rest(lines, waiting, reason)
        await self._output.flush()

    def _must_end(self) -> FinishReason | None:
        """Return how the lines end that are not answered, if they are to end now."""
        record = self._lease.record
        if record.status == "finalizing":
            return None
        if self._lease.is_cancelled:
            return "expired" if record.ends_as == "expired" else "cancelled"
        if self._services.clock.now() >= record.expires_at:
            record.ends_as = "expired"
            return "expired"
        return None

    async def _undone_lines(self) -> AsyncIterator[InputLine]:
        record = self._lease.record
        async for group in input_lines(self._read, self._services.max_line_bytes, record.position):
            for place in group:
                if not record.is_done(place.number):
                    yield place
                self._read_to = (place.number + 1, place.end + 1)

    async def _read(self, start: int, num_bytes: int) -> bytes:
        assert self._file is not None
        catalog = self._services.catalog
        return await patiently(catalog, partial(catalog.read, self._file, start, num_bytes))

    async def _fill(self, lines: AsyncIterator[InputLine], waiting: list[InputLine]) -> bool:
        """Publish lines while the queue is to have more; return whether all were read."""
        # Not without end: lines that are set aside are no jobs, and the batch may be cancelled meanwhile.
        for _ in range(_AHEAD // _PUBLISHED_AT_ONCE):
            if self._is_full:
                return False
            is_last = False
            room = (MAX_JOBS - self._jobs.num_jobs) // self._most_jobs
            at_once = min(max(room, 1), _PUBLISHED_AT_ONCE)
            while len(waiting) < at_once and _size(waiting) < _BYTES_AT_ONCE and not is_last:
                line = await anext(lines, None)
                is_last = line is None
                waiting += [] if line is None else [line]
            if waiting and not await self._publish(waiting, at_once):
                # Results of this batch make room, or the queue's other jobs.
                await asyncio.sleep(0 if self._is_full else _FULL_S)
                return is_last
            if is_last:
                return True
        return False

    @property
    def _is_full(self) -> bool:
        return self._jobs.num_jobs >= MAX_JOBS or self._jobs.num_bytes >= MAX_JOB_BYTES

    async def _publish_aside(self) -> None:
        """Publish lines that were set aside, if some are due."""
        if self._is_full or not (due := self._aside.take_due()):
            return
        places = await asyncio.gather(*(self._with_data(place) for place, _ in due))
        tries = [(place, attempt) for place, (_, attempt) in zip(places, due, strict=True)]
        results = await asyncio.gather(*(self._publish_line(*each) for each in tries))
        for (place, attempt), is_published in zip(tries, results, strict=True):
            if not is_published:
                self._aside.wait(place, attempt, "queue")

    async def _with_data(self, place: InputLine) -> InputLine:
        data = await self._read(place.start, place.end - place.start)
        return place._replace(data=line_data(data, place.start))

    async def _publish(self, waiting: list[InputLine], at_once: int) -> bool:
        """Publish the first lines and take them from the list; return False if some found no room."""
        record, last = self._lease.record, max(place.number for place in waiting)
        if last > record.num_sent:
            record.num_sent = last + _AHEAD
            await self._lease.save()
        first = waiting[:at_once]
        results = await asyncio.gather(*map(self._publish_line, first))
        waiting[:at_once] = [place for place, is_sent in zip(first, results, strict=True) if not is_sent]
        return all(results)

    async def _publish_line(self, place: InputLine, attempt: int = 0) -> bool:
        """Publish a line, unless it has its results, or set it aside; return False if there is no room for it now."""
        may_have_results = attempt > 0 or place.number <= self._sent_before
        try:
            if may_have_results and await self._has_results(place, attempt):
                return True
            line = await self._maker.line_to_publish(place, self._jobs.prefix(place.number, attempt))
        except BadRequestError as error:
            self._refuse(place, error)
            return True
        except NotReadyError as error:
            if error.reason == "images":
                self._log_limit.warning("", "lines of batch %s wait for images: %s", self._lease.record.id, error)
            self._aside.wait(place, attempt, error.reason)
            return True
        self._most_jobs = max(self._most_jobs // 2, len(line.requests))
        if self._is_full:
            return False
        sent = self._jobs.note(place, line, attempt)
        try:
            await self._jobs.publish(line)
        except QueueFullError:
            self._jobs.forget(sent)
            self._partly_sent.add(place.number)
            return False
        except MaxPayloadError:
            self._jobs.forget(sent)
            message = "The request is larger than a message of the queue may be."
            self._refuse(place, BadRequestError(message, "body", "request_too_large"))
        return True

    async def _has_results(self, place: InputLine, attempt: int) -> bool:
        """Take the results of a line if all are there, which takes no worker of its model."""
        line = await self._maker.line_to_read(place, self._jobs.prefix(place.number, attempt))
        sent = self._jobs.note(place, line, attempt)
        if await self._jobs.find(sent):
            return True
        self._jobs.forget(sent)
        return False

    async def _take(self) -> None:
        complete, repeated = self._jobs.take()
        for sent in complete:
            await self._answer(sent)
        for sent in repeated:
            # A worker may not have found one.
            for request in sent.line.requests:
                self._services.images.forget(request.media, self.tenant)
            self._aside.repeat(sent.place, sent.attempt + 1)

    async def _answer(self, sent: SentLine) -> None:
        """Write a line's answer. A text of 60 kB takes a tenth of a second to be read."""
        write = partial(written_line, sent.line)
        is_large = sent.line.result_bytes > INLINE_BYTES
        written = await self._services.bodies.in_thread(self.tenant, write) if is_large else write()
        self._output.add(
            sent.place.number,
            written.data,
            is_answer=written.is_answer,
            usage=sent.line.usage(),
            reasoning_tokens=written.reasoning_tokens,
        )
        # Many lines may be complete at the same time.
        await asyncio.sleep(0)

    def _refuse(self, place: InputLine, error: BadRequestError) -> None:
        body = {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.code}
        response = {"status_code": 400, "request_id": self._jobs.prefix(place.number), "body": {"error": body}}
        self._write_error(place, self._custom_id(place), response, None)

    def _custom_id(self, place: InputLine) -> str:
        try:
            return checked_id(line_fields(place, self._services.max_line_bytes))
        except BadRequestError:
            return ""

    def _write_error(
        self, place: InputLine, custom_id: str, response: dict[str, object] | None, error: dict[str, str] | None
    ) -> None:
        output = {"id": self._jobs.prefix(place.number), "custom_id": custom_id, "response": response, "error": error}
        self._output.add(place.number, msgspec.json.encode(output), is_answer=False)

    def _is_all_answered(self, waiting: list[InputLine]) -> bool:
        # Asked whenever a result comes, beside up to 50,000 lines that are set aside: they are not gone through.
        return not (waiting or self._aside or self._jobs.lines)

    def _unanswered(self, waiting: list[InputLine]) -> list[InputLine]:
        return [*(sent.place for sent in self._jobs.lines), *waiting, *(place for place, _ in self._aside.lines)]

    def _position(self, waiting: list[InputLine]) -> tuple[int, int]:
        """Return where the first line may be that is not done."""
        places = self._unanswered(waiting)
        return min([(place.number, place.start) for place in places], default=self._read_to)

    async def _end_rest(self, lines: AsyncIterator[InputLine], waiting: list[InputLine], reason: FinishReason) -> None:
        """End the unanswered lines: queued ones with their output so far, the others without a job."""
        messages = {
            "expired": "This request could not be executed before the completion window expired.",
            "cancelled": "The batch was cancelled before this request was executed.",
        }
        error = {"code": f"batch_{reason}", "message": messages[reason]}
        await self._end_jobs(reason)
        async for place, attempt in self._rest(lines, waiting):
            may_have_jobs = attempt > 0 or place.number <= self._sent_before or place.number in self._partly_sent
            if not may_have_jobs:
                self._write_error(place, self._custom_id(place), None, error)
            else:
                try:
                    line = await self._maker.line_to_read(place, self._jobs.prefix(place.number, attempt))
                    self._jobs.note(place, line, attempt)
                except BadRequestError as refusal:
                    self._refuse(place, refusal)
            if self._jobs.num_jobs >= MAX_JOBS:
                await self._end_jobs(reason)
            if self._output.is_due:
                await self._output.flush()
        await self._end_jobs(reason)

    async def _rest(
        self, lines: AsyncIterator[InputLine], waiting: list[InputLine]
    ) -> AsyncIterator[tuple[InputLine, int]]:
        """Yield the lines that are not answered and have no job, and how often their jobs were renamed."""
        for place in waiting:
            yield place, 0
        aside = self._aside.take_all()
        for start in range(0, len(aside), _PUBLISHED_AT_ONCE):
            group = aside[start : start + _PUBLISHED_AT_ONCE]
            places = await asyncio.gather(*(self._with_data(place) for place, _ in group))
            for place, (_, attempt) in zip(places, group, strict=True):
                yield place, attempt
        async for place in lines:
            yield place, 0

    async def _end_jobs(self, reason: FinishReason) -> None:
        while self._jobs.lines:
            await self._jobs.end_all(reason, self._services.clock.now())
            complete, repeated = self._jobs.take()
            for sent in complete:
                await self._answer(sent)
            for sent in repeated:
                error = {"code": f"batch_{reason}", "message": "The result of this request is no longer kept."}
                self._write_error(sent.place, sent.line.custom_id, None, error)


def _size(lines: list[InputLine]) -> int:
    return sum(line.end - line.start for line in lines)
