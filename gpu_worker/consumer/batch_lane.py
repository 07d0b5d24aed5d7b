"""Batch requests: from the batch queue to one stored result each.

The result is written only if there is none, then the message is acknowledged (`ResultStore`), so a request that two
workers compute has one result. One that is delivered again continues from its record (`ProgressRecords`). The tenant is
the one in the subject, which permissions protect: a job that names another, or another's reply subject, fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
from nats.js.errors import APIError

from gpu_worker.consumer.batch_job import NotAJobError, RefusedJobError, read_job
from gpu_worker.consumer.batch_progress import ProgressRecords, is_due
from gpu_worker.consumer.batch_trials import BatchTrials
from gpu_worker.consumer.gateway_watch import Cancellations
from gpu_worker.consumer.held_request import HeldRequest, HeldRequests, log_fields
from gpu_worker.consumer.intake import Intake
from gpu_worker.consumer.queued_message import ACK, DISCARD, REDELIVER, QueuedMessage, send_ack
from gpu_worker.consumer.request_observer import ReceiptWriter
from gpu_worker.consumer.result_store import ResultMaker, ResultStore
from gpu_worker.core.sequence import SequenceStatus
from gpu_worker.engine.engine_thread import EngineThread
from shared.background_tasks import BackgroundTasks
from shared.dead_letters import DeadLetter
from shared.direct_client import DirectClient
from shared.errors import BadRequestError
from shared.kept_results import JOB_ENDED, JobEnd
from shared.log_limit import LogLimit
from shared.messages import Cancel, Delta, FinishReason, Request
from shared.nats_connection import SEND_ERRORS
from shared.sampling import SamplingDefaults
from shared.server_clock import ServerClock

PROGRESS_INTERVAL_S = 5.0
MAX_BACKGROUND = 8
"""Background jobs of one tenant that run as interactive requests do. Jobs pass no gateway, which would apply the limits
of a key."""

_SAVED_TOKENS = 64
"""New tokens after which the progress of a running request is recorded again."""

_ERRORS: tuple[type[Exception], ...] = (APIError, *SEND_ERRORS)

_log = logging.getLogger(__name__)


class BatchLane:
    """Takes and ends batch requests."""

    def __init__(
        self,
        worker: str,
        max_attempts: int,
        intake: Intake,
        engine: EngineThread,
        held: HeldRequests,
        results: ResultStore,
        progress: ProgressRecords,
        nats: DirectClient,
        chat_format: str = "",
        sampling_defaults: SamplingDefaults | None = None,
        clock: ServerClock | None = None,
        receipts: ReceiptWriter | None = None,
    ) -> None:
        """Answer in the name of `worker`; a request that has failed `max_attempts` times without progress is dead.

        Results have the model's `chat_format`. What a job leaves out of its sampling is as `sampling_defaults` say.
        """
        self._clock = clock or ServerClock()
        self._sampling_defaults = sampling_defaults
        self._receipts = receipts or ReceiptWriter()
        self._result_maker = ResultMaker(worker, chat_format, self._clock, self._receipts)
        self._log_limit = LogLimit(_log)
        self._nats = nats
        self._worker = worker
        self._max_attempts = max_attempts
        self._intake = intake
        self._engine = engine
        self._held = held
        self.results = results
        self._progress = progress
        self._tasks = BackgroundTasks()
        self._cancellations = Cancellations()
        self.trials = BatchTrials(held, lambda suspect: intake.begin(suspect, self), self.make_way)

    def take(self, message: QueuedMessage) -> None:
        """Take a message from the queue."""
        if self._held.is_withdrawn:
            send_ack(self._nats, message, REDELIVER)
            return
        try:
            request = read_job(message, self._sampling_defaults)
        except NotAJobError as error:
            extra = {"subject": message.subject, "error": error.cause}
            self._log_limit.warning(message.subject, str(error), extra=extra)
            send_ack(self._nats, message, DISCARD)
            return
        except RefusedJobError as error:
            unheld = HeldRequest(f"{error.request.tenant}/{error.request.id}", error.request, message)
            result = self._result_maker.result(unheld, "failed", 0, str(error))
            self.results.put(unheld.key, error.request, message, result)
            return
        key = f"{request.tenant}/{request.id}"
        current = self._held.get(key)
        if current is not None and current.message.stream_seq == message.stream_seq:
            # The worker was late to report progress, which is not a failed attempt: the new delivery is answered.
            current.message = message
            if current.is_looked_up:
                self._tasks.spawn(self._save(current), f"progress of {current.key}")
            return
        if current is not None:
            # Published twice; the first answers both.
            send_ack(self._nats, message, ACK)
            return
        if self.results.has(key, message):
            return
        is_background = request.is_background and self._held.num_background_of(request.tenant) < MAX_BACKGROUND
        self._begin(HeldRequest(key, request, message, is_background=is_background))

    def _begin(self, held: HeldRequest) -> None:
        request, num_delivered = held.request, held.message.num_delivered
        self._held.add(held)
        if request.deadline is not None and request.deadline <= self._clock.now():
            self._end(held, "expired")
        else:
            held.is_looked_up = False
            if self._was_cancelled(request):
                held.outcome = "cancelled"  # it ends when its record has been read
            # A redelivery during the look-up is not a failed attempt, so the count of this delivery is used.
            work = self._resume(held, num_delivered) if num_delivered > 1 else self._continue(held, 1)
            self._tasks.spawn(work, f"begin {held.key}")

    def cancel(self, cancel: Cancel) -> None:
        """End the requests of a cancellation that are held, with what they have so far; others end as they come.

        A message may be on its way here when its request is cancelled. A cancellation without a tenant is of
        interactive requests.
        """
        if cancel.tenant is None:
            return
        now = time.monotonic()
        for request_id in cancel.ids:
            self._cancellations.add(_name(cancel.tenant, request_id), None, now)
        for held in self._held:
            job = held.request
            if job.lane != "batch" or job.tenant != cancel.tenant or job.id not in cancel.ids:
                continue
            if held.is_looked_up:
                self._end(held, "cancelled", num_output=held.num_output_tokens)
            else:
                held.outcome = "cancelled"  # it ends when its record has been read

    def _was_cancelled(self, job: Request) -> bool:
        return self._cancellations.covers(_name(job.tenant, job.id), 0, time.monotonic())

    def make_way(self) -> None:
        """Give back requests without output: a suspect begins only when nothing else could be to blame."""
        for held in self._held:
            is_waiting = held.is_parked or not held.is_looked_up
            if held.request.lane == "batch" and held.is_without_output and not is_waiting:
                self.give_back(held)

    def give_back_suspects(self) -> None:
        """Give back the requests that wait for a trial, because this worker drains."""
        for held in self._held:
            if held.is_parked:
                self.give_back(held)

    async def announce(self, held: HeldRequest) -> bool:
        """Record that a trial begins, so that the next worker knows which request killed this one.

        If that cannot be recorded the trial is put off: otherwise the request could kill one worker after the other.
        """
        is_recorded = await self._progress.save(held)
        if not is_recorded and self._held.is_current(held):
            self.trials.put_off(held)
        return is_recorded

    def admitted(self, held: HeldRequest) -> None:
        """Do nothing: a batch request has no answer before its result."""

    def refuse(self, held: HeldRequest, error: BadRequestError) -> None:
        """Store that a request can never run, and which field is to blame."""
        self._end(held, "failed", error=str(error), param=error.param or "prompt", code=error.code)

    def fail(self, held: HeldRequest, error: str) -> None:
        """Store that a request has failed."""
        self._end(held, "failed", error=error)

    def give_back(self, held: HeldRequest) -> None:
        """Hand a request to another worker, which continues it."""
        held.outcome = "handoff"
        self._remove(held)
        if held.is_looked_up:
            self._tasks.spawn(self._hand_over(held), f"hand over {held.key}")

    def unavailable(self, held: HeldRequest, error: str, code: str) -> None:
        """Let another worker try: batch jobs wait, where interactive clients are asked to retry."""
        self.give_back(held)

    def abandon(self, held: HeldRequest) -> None:
        """Leave a request to another worker as a dying worker does: unrecorded progress is computed again."""
        self._remove(held)
        send_ack(self._nats, held.message, REDELIVER)

    async def save_progress(self) -> None:
        """Record the progress of running requests that have many new tokens."""
        await self._save_where(lambda held: held.num_output_tokens >= held.num_recorded_tokens + _SAVED_TOKENS)

    async def save_followed(self) -> None:
        """Record the progress of requests that clients follow, where there is any."""
        self.trials.review()
        await self._save_where(lambda held: is_due(held, time.monotonic()))

    async def _save_where(self, is_wanted: Callable[[HeldRequest], bool]) -> None:
        """Record requests within the rates of their tenants, those first whose record is oldest."""
        for held in sorted(self._held, key=lambda held: held.recorded_at):
            if is_wanted(held) and (held.was_lost or self._progress.has_room(held.request.tenant)):
                await self._save(held)

    def advance(self, held: HeldRequest, delta: Delta) -> None:
        """Add a delta to a request's answer; store the result if it is the last one."""
        held.parts.append(delta.text)
        if delta.logprobs:
            held.total_logprob += sum(entry.logprob for entry in delta.logprobs)
        held.num_output_tokens = delta.seq + len(delta.token_ids)
        is_cleared = held.num_failed and self.trials.note_output(held, len(delta.token_ids))
        # The first text of a followed request, and requests that lost a worker before, do not wait for the next round.
        is_first = bool(delta.text) and not held.recorded_at and self._progress.has_room(held.request.tenant)
        if is_cleared or ((held.was_lost or is_first) and is_due(held, time.monotonic())):
            self._tasks.spawn(self._save(held), f"progress of {held.key}")
        if (finish := delta.finish) is not None:
            held.vector = finish.vector
            num_output = held.num_output_tokens if finish.usage is None else finish.usage.completion_tokens
            param, code = finish.error_param, finish.error_code
            self._end(held, finish.reason, num_output=num_output, error=finish.error, param=param, code=code)

    async def close(self) -> None:
        """Wait for the results and records on their way."""
        await self._tasks.wait()
        await self.results.close()

    async def _resume(self, held: HeldRequest, num_delivered: int) -> None:
        self.trials.num_coming += 1
        try:
            await self._continue(held, num_delivered)
        finally:
            self.trials.num_coming -= 1

    async def _continue(self, held: HeldRequest, num_delivered: int) -> None:
        """Begin a request, or continue where its record ends; one that fails here must not be held for ever."""
        try:
            end = await self._known_end(held)
            await self._look_up(held, num_delivered)
            await self._begin_known(held, end)
        except Exception:
            _log.exception("batch request not continued", extra=log_fields(held.request))
            if self._held.is_current(held):
                self.fail(held, "the worker could not continue the request")

    async def _begin_known(self, held: HeldRequest, end: JobEnd | None) -> None:
        """Begin what has not ended yet, after a trial if it is a suspect; or give it up."""
        if not self._held.is_current(held):
            if held.outcome == "handoff":
                await self._hand_over(held)
        elif held.outcome == "cancelled":
            self._end(held, "cancelled", num_output=held.num_output_tokens)
        elif end is not None:
            # Stored only if the earlier result is no longer kept.
            when = datetime.fromtimestamp(end.ended, UTC).isoformat(timespec="seconds")
            error = f"a job of this id has ended before ({end.finish}, {when})"
            error += "; publish it under a new id to run it again"
            self._end(held, "failed", error=error, param="id", code=JOB_ENDED)
        elif held.num_failed >= self._max_attempts:
            error = f"given up after {self._max_attempts} attempts: each lost its worker"
            now = time.time()
            lost = DeadLetter(
                request=held.request, reason="worker_lost", error=error, quarantined_by=self._worker, quarantined=now
            )
            self._end(held, "failed", error=error, letter=lost)
        elif held.num_failed:
            # Deaths while it waits are not its own.
            await self._progress.save(held)
            if self._held.is_current(held):
                self.trials.add(held)
        elif self._held.has_suspect:
            self.give_back(held)
        else:
            self._intake.begin(held, self)

    async def _known_end(self, held: HeldRequest) -> JobEnd | None:
        """Return how a job of this id ended; None also where NATS does not answer.

        It is run then: its result is stored only if there is none.
        """
        try:
            return await self.results.kept.end_of(held.request.tenant, held.request.id)
        except _ERRORS as error:
            extra = log_fields(held.request) | {"error": repr(error)}
            self._log_limit.warning("ends", "not known whether a batch request has ended before", extra=extra)
            return None

    async def _look_up(self, held: HeldRequest, num_delivered: int) -> None:
        """Take from the record of a request what it has, and how many of its deliveries have failed since."""
        request = held.request
        if num_delivered == 1:
            held.is_looked_up = True
            return
        record = await self._progress.find(held, lambda: self._held.is_current(held))
        held.num_failed = max(0, num_delivered - 1 - record.num_delivered)
        held.was_lost = held.num_failed > 0
        if len(record.token_ids) > len(request.emitted):
            # The prompt's echo is in the recorded text.
            known = {"emitted": record.token_ids, "adapter": record.adapter or request.adapter}
            held.request = msgspec.structs.replace(request, echo=False, evicted=record.evicted, **known)
            held.parts = [record.text]
            held.total_logprob, held.in_reasoning = record.total_logprob, record.in_reasoning
            held.resume(len(record.token_ids))
        held.is_looked_up = True

    async def _save(self, held: HeldRequest) -> None:
        if held.request.lane == "batch" and self._held.is_current(held):
            held.num_recorded_tokens, held.recorded_at = held.num_output_tokens, time.monotonic()
            await self._progress.save(held)

    async def _hand_over(self, held: HeldRequest) -> None:
        await self._progress.save(held)
        send_ack(self._nats, held.message, REDELIVER)

    def _remove(self, held: HeldRequest) -> None:
        self._held.remove(held)
        receipt = self._receipts.receipt(held, held.num_output_tokens)
        self.results.usage.add_time(held.request.tenant, held.request.model, receipt)
        self.trials.forget(held)
        if held.sequence is not None and held.sequence.status is not SequenceStatus.FINISHED:
            self._engine.abort(held.sequence.id)

    def _end(
        self,
        held: HeldRequest,
        reason: FinishReason,
        *,
        num_output: int = 0,
        error: str | None = None,
        param: str | None = None,
        code: str | None = None,
        letter: DeadLetter | None = None,
    ) -> None:
        held.outcome = reason
        self._remove(held)
        result = self._result_maker.result(held, reason, num_output, error)
        if param is not None:
            result = msgspec.structs.replace(result, error_param=param, error_code=code)
        self.results.put(held.key, held.request, held.message, result, letter)


def _name(tenant: str, request_id: str) -> str:
    """Return under which name a cancellation is remembered; no tenant's name has a NUL character."""
    return f"{tenant}\0{request_id}"
