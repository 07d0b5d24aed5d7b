"""Writes batch results, each once, however long that takes.

A result is written only if there is none yet; then it is sent to the reply subject and the message is acknowledged.
While NATS does not take it, it stays here, is tried again, and the lane pulls nothing (`is_blocked`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import msgspec
from nats.aio.client import Client

from gpu_worker.consumer.held_request import HeldRequest, log_fields
from gpu_worker.consumer.queued_message import ACK, IN_PROGRESS, QueuedMessage, send_ack
from gpu_worker.consumer.request_observer import ReceiptWriter
from shared.background_tasks import BackgroundTasks
from shared.dead_letters import DeadLetter, publish_dead_letter
from shared.direct_client import DirectClient
from shared.errors import DependencyError
from shared.kept_results import JOB_ENDED, KeptResults
from shared.log_limit import LogLimit
from shared.messages import BatchResult, FinishReason, Request
from shared.nats_connection import SEND_ERRORS
from shared.result_shares import ResultShares
from shared.server_clock import ServerClock
from shared.subjects import is_batch_reply
from shared.usage_ledger import UsageLedger

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 2.0
_PUBLISH_TIMEOUT_S = 3.0
_MARGIN_BYTES = 1024
_REFUSALS: tuple[type[Exception], ...] = (DependencyError, *SEND_ERRORS)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResultMaker:
    """Makes results in the name of one worker."""

    worker: str
    chat_format: str
    clock: ServerClock
    receipts: ReceiptWriter

    def result(self, held: HeldRequest, reason: FinishReason, num_output: int, error: str | None) -> BatchResult:
        """Return the result of a request that ends now, with `num_output` tokens."""
        request, sequence = held.request, held.sequence
        num_prompt = 0 if sequence is None else sequence.num_prompt_tokens
        receipt = self.receipts.receipt(held, num_output)
        num_evicted = 0 if sequence is None else sequence.num_evicted_at(num_output)
        output = request.emitted if sequence is None else sequence.token_ids[num_prompt : num_prompt + num_output]
        return BatchResult(
            id=request.id,
            model=request.model,
            tenant=request.tenant,
            text="".join(held.parts),
            finish=reason,
            token_ids=tuple(output[:num_output]),
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            error=error,
            attempt=held.message.num_delivered,
            worker=self.worker,
            created=request.created,
            completed=self.clock.now(),
            vector=held.vector,
            cached_tokens=0 if sequence is None else sequence.num_cached_tokens,
            in_reasoning=held.in_reasoning,
            chat_format=self.chat_format,
            total_logprob=None if request.sampling.logprobs is None else held.total_logprob,
            evicted_tokens=num_evicted,
            evicted_by=request.kv_budget.policy if request.kv_budget is not None and num_evicted else "",
            device_s=receipt.device_s,
            receipt=receipt,
        )


async def send_result(nats: Client, request: Request, payload: bytes) -> None:
    """Send the encoded result to the reply subject of the request, if it names one that its tenant may use."""
    if request.reply is None or not is_batch_reply(request.reply, request.tenant):
        return
    try:
        await nats.publish(request.reply, payload)
    except SEND_ERRORS as error:
        _log.warning("batch result not sent to its reply subject", extra=log_fields(request) | {"error": repr(error)})


@dataclass(slots=True, eq=False)
class _Storing:
    """A result on its way; `message` is the latest delivery of its request."""

    request: Request
    message: QueuedMessage
    result: BatchResult
    payload: bytes
    letter: DeadLetter | None


class ResultStore:
    """Owns the results that are not written yet.

    Attributes:
        num_dead_letters: Requests put into quarantine since the start.
        usage: What tenants have had of the batch lane.
    """

    def __init__(self, nats: DirectClient, clock: ServerClock) -> None:
        self._nats = nats
        js = nats.jetstream(timeout=_PUBLISH_TIMEOUT_S)
        self.kept = KeptResults(js, ResultShares(js, can_purge=True, clock=clock))
        self._js = js
        self.usage = UsageLedger("batch")
        self._storing: dict[str, _Storing] = {}
        self._tasks = BackgroundTasks()
        self._num_refused = 0
        self.num_dead_letters = 0
        self._is_closing = asyncio.Event()
        self._log_limit = LogLimit(_log)

    @property
    def is_blocked(self) -> bool:
        """Return whether a result could not be written at the last attempt."""
        return self._num_refused > 0

    def put(
        self, key: str, request: Request, message: QueuedMessage, result: BatchResult, letter: DeadLetter | None = None
    ) -> None:
        """Begin to write the result of the request `key`, after a dead letter if there is one."""
        result, payload = self._encode(result)
        storing = _Storing(request, message, result, payload, letter)
        self._storing[key] = storing
        self._tasks.spawn(self._store(key, storing), f"result {key}")

    def has(self, key: str, message: QueuedMessage) -> bool:
        """Return whether a delivery is of a request whose result is being written; it is answered in its place then."""
        storing = self._storing.get(key)
        if storing is None or storing.message.stream_seq != message.stream_seq:
            return False
        storing.message = message
        return True

    async def close(self) -> None:
        """Wait for attempts under way; the queue redelivers requests whose results NATS did not take."""
        self._is_closing.set()
        await self._tasks.wait()
        await self.kept.shares.close()
        await self.usage.flush(self._js, is_last=True)

    async def flush_usage(self) -> None:
        """Have NATS add up the counted usage."""
        await self.usage.flush(self._js)

    def _encode(self, result: BatchResult) -> tuple[BatchResult, bytes]:
        """Return a result that fits into one message, and its bytes."""
        payload = msgspec.json.encode(result)
        if len(payload) > self._nats.max_payload - _MARGIN_BYTES:
            error = "the result is too large for one message"
            result = msgspec.structs.replace(result, text="", token_ids=(), finish="failed", error=error)
            payload = msgspec.json.encode(result)
        return result, payload

    async def _store(self, key: str, storing: _Storing) -> None:
        wait_s, num_refusals = FIRST_RETRY_S, 0
        try:
            while not await self._attempt(storing, is_repeated=num_refusals > 0):
                if self._is_closing.is_set():
                    return
                num_refusals += 1
                self._num_refused += num_refusals == 1
                send_ack(self._nats, storing.message, IN_PROGRESS)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_closing.wait(), wait_s)
                wait_s = min(2 * wait_s, LAST_RETRY_S)
            if num_refusals:
                _log.info("batch result stored in the end", extra=log_fields(storing.request))
            send_ack(self._nats, storing.message, ACK)
        finally:
            self._num_refused -= num_refusals > 0
            # A job that was published again under the same id may have taken its place meanwhile.
            if self._storing.get(key) is storing:
                del self._storing[key]

    async def _attempt(self, storing: _Storing, *, is_repeated: bool) -> bool:
        """Write the result if there is none; return whether there is one now."""
        request = storing.request
        try:
            if storing.letter is not None:
                await publish_dead_letter(self._nats, storing.letter)
                storing.letter = None
                self.num_dead_letters += 1
            is_first = await self.kept.store(request.tenant, request.id, storing.payload, storing.result.finish)
        except _REFUSALS as error:
            told = "batch result not stored yet"
            self._log_limit.warning(request.tenant, told, extra=log_fields(request) | {"error": repr(error)})
            return False
        # Who cancels a job has stored its result before.
        if is_first or storing.result.finish == "cancelled":
            self._count(storing.result)
        if not is_first:
            _log.info("batch request has a result already", extra=log_fields(request))
        # When a repeated attempt finds a result, an earlier one may have stored it and lost the answer. That a job has
        # ended before is not an answer where its result is kept.
        if is_first or (is_repeated and storing.result.error_code != JOB_ENDED):
            await send_result(self._nats, request, storing.payload)
        return True

    def _count(self, result: BatchResult) -> None:
        self.usage.add(
            result.tenant,
            result.model,
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            completion_tokens=result.completion_tokens,
        )
