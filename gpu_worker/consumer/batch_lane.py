"""Requests that wait without hurting anybody: from the batch queue to one stored result each.

The result is written only if there is none yet, then the message is acknowledged. So a request that two workers have
computed, because one was believed dead, still has one result. The tenant is the one in the subject, which permissions
protect: a job that names another tenant, or another tenant's subject for its reply, fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError

from gpu_worker.consumer.held_request import HeldRequest, HeldRequests, log_fields
from gpu_worker.consumer.intake import Intake
from gpu_worker.consumer.outbox import Outbox
from gpu_worker.consumer.queued_message import ACK, DISCARD, REDELIVER, QueuedMessage, tell
from gpu_worker.consumer.unreadable import UnreadableRequestError, read_request
from gpu_worker.core.sequence import SequenceStatus
from gpu_worker.engine_thread import EngineThread
from shared.errors import BadRequestError, InvalidNameError
from shared.messages import BatchResult, Delta, FinishReason, Request
from shared.nats_connection import SEND_ERRORS
from shared.subjects import decode_name, is_batch_reply, reply_prefix, result_subject

_WRONG_LAST_SEQUENCE = 10071
_REDELIVERY_DELAY = b'-NAK {"delay": 2000000000}'

_log = logging.getLogger(__name__)


class BatchLane:
    """Takes and ends batch requests."""

    def __init__(
        self,
        nats: Client,
        worker: str,
        max_deliver: int,
        intake: Intake,
        engine: EngineThread,
        held: HeldRequests,
        outbox: Outbox,
    ) -> None:
        """Store results in the name of `worker`; a request delivered more than `max_deliver` times fails."""
        self._nats = nats
        self._js: JetStreamContext = nats.jetstream()
        self._worker = worker
        self._max_deliver = max_deliver
        self._intake = intake
        self._engine = engine
        self._held = held
        self._outbox = outbox
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: QueuedMessage) -> None:
        """Take a message from the queue."""
        try:
            model, tenant = _names(message.subject)
            request = read_request(message.data)
        except InvalidNameError as error:
            # Never stored by whoever may publish under canonical names only, so nobody waits for a result.
            _log.warning("batch subject is malformed", extra={"subject": message.subject, "error": str(error)})
            self._spawn(tell(self._nats, message, DISCARD))
            return
        except UnreadableRequestError as error:
            self._refuse_unreadable(message, error, model, tenant)
            return
        problem = _mismatch(request, model, tenant)
        request = msgspec.structs.replace(request, lane="batch", model=model, tenant=tenant)
        if problem is not None:
            self._refuse_unheld(message, request, problem)
            return
        key = f"{tenant}/{request.id}"
        current = self._held.get(key)
        if current is not None and current.message.stream_seq == message.stream_seq:
            current.message = message
            return
        if current is not None:
            # Published twice; the first answers both.
            self._outbox.acknowledge(message)
            return
        held = HeldRequest(key, request, message)
        self._held.add(held)
        if message.num_delivered > self._max_deliver:
            self._end(held, "failed", error=f"given up after {self._max_deliver} attempts: each lost its worker")
        elif request.deadline is not None and request.deadline <= time.time():
            self._end(held, "expired")
        else:
            self._intake.begin(held, self)

    async def announce(self, held: HeldRequest, num_prompt_tokens: int) -> None:
        """Nobody is told about a batch request before its end."""

    def admitted(self, held: HeldRequest) -> None:
        """Nobody is told about a batch request before its end."""

    def refuse(self, held: HeldRequest, error: BadRequestError) -> None:
        """Store that a request can never run."""
        self.fail(held, str(error))

    def fail(self, held: HeldRequest, error: str) -> None:
        """Store that a request has failed."""
        self._end(held, "failed", error=error)

    def give_back(self, held: HeldRequest) -> None:
        """Let another worker do it."""
        self._remove(held)
        self._spawn(tell(self._nats, held.message, REDELIVER))

    def advance(self, held: HeldRequest, delta: Delta) -> None:
        """Collect what a step did to a request, and store the result when it is the last."""
        held.parts.append(delta.text)
        if delta.finish is not None:
            usage = delta.finish.usage
            num_output = delta.seq + len(delta.token_ids) if usage is None else usage.completion_tokens
            self._end(held, delta.finish.reason, num_output=num_output, error=delta.finish.error)

    async def close(self) -> None:
        """Wait for the results on their way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _remove(self, held: HeldRequest) -> None:
        self._held.remove(held)
        if held.sequence is not None and held.sequence.status is not SequenceStatus.FINISHED:
            self._engine.abort(held.sequence.id)

    def _end(self, held: HeldRequest, reason: FinishReason, *, num_output: int = 0, error: str | None = None) -> None:
        self._remove(held)
        self._spawn(self._store(held.request, held.message, self._result(held, reason, num_output, error)))

    def _result(self, held: HeldRequest, reason: FinishReason, num_output: int, error: str | None) -> BatchResult:
        request, sequence = held.request, held.sequence
        num_prompt = 0 if sequence is None else sequence.num_prompt_tokens
        output = [] if sequence is None else sequence.token_ids[num_prompt : num_prompt + num_output]
        return BatchResult(
            id=request.id,
            model=request.model,
            tenant=request.tenant,
            text="".join(held.parts),
            finish=reason,
            token_ids=tuple(output),
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            error=error,
            attempt=held.message.num_delivered,
            worker=self._worker,
            created=request.created,
            completed=time.time(),
        )

    async def _store(self, request: Request, message: QueuedMessage, result: BatchResult) -> None:
        """Write the result if there is none, tell who asked, and acknowledge."""
        payload = msgspec.json.encode(result)
        if len(payload) > self._nats.max_payload - 1024:
            error = "the result is too large for one message"
            payload = msgspec.json.encode(
                msgspec.structs.replace(result, text="", token_ids=(), finish="failed", error=error)
            )
        headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
        try:
            subject = result_subject(request.tenant, request.id)
            await self._js.publish(subject, payload, headers=headers)
            if request.reply is not None and is_batch_reply(request.reply, request.tenant):
                await self._nats.publish(request.reply, payload)
            await tell(self._nats, message, ACK)
        except APIError as error:
            if error.err_code == _WRONG_LAST_SEQUENCE:
                _log.info("batch request has a result already", extra=log_fields(request))
                await tell(self._nats, message, ACK)
                return
            _log.warning("batch result not stored", extra=log_fields(request) | {"error": repr(error)})
            await tell(self._nats, message, _REDELIVERY_DELAY)
        except SEND_ERRORS as error:
            # Not acknowledged, so the queue delivers it again.
            _log.warning("batch result not stored", extra=log_fields(request) | {"error": repr(error)})

    def _refuse_unreadable(
        self, message: QueuedMessage, error: UnreadableRequestError, model: str, tenant: str
    ) -> None:
        if error.envelope is None:
            _log.warning("message is not a batch request", extra={"error": str(error)})
            self._spawn(tell(self._nats, message, DISCARD))
            return
        request = Request(id=error.envelope.id, model=model, tenant=tenant, lane="batch", reply=error.envelope.reply)
        self._refuse_unheld(message, request, str(error))

    def _refuse_unheld(self, message: QueuedMessage, request: Request, error: str) -> None:
        """Store that a job failed before anything was done about it."""
        held = HeldRequest(f"{request.tenant}/{request.id}", request, message)
        self._spawn(self._store(request, message, self._result(held, "failed", 0, error)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _names(subject: str) -> tuple[str, str]:
    """Return the model and the tenant of a queue's subject, `hr.req.<model>.batch.<tenant>`.

    Raises:
        InvalidNameError: One of them is not the encoding of a name.
    """
    _, _, model, _, tenant = subject.split(".")
    return decode_name(model), decode_name(tenant)


def _mismatch(request: Request, model: str, tenant: str) -> str | None:
    """Return what a job claims that its subject does not allow, or None."""
    if request.tenant != tenant:
        return f"the job says tenant {request.tenant[:64]!r}, but was published for tenant {tenant[:64]!r}"
    if request.model != model:
        return f"the job says model {request.model[:64]!r}, but was published for model {model[:64]!r}"
    if request.reply is not None and not is_batch_reply(request.reply, tenant):
        return f"reply must be a subject that begins with {reply_prefix(tenant)!r}"
    return None
