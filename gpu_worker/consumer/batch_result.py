"""The result of a batch request: made of what is held, and sent to the reply subject that it names."""

from __future__ import annotations

import logging

from nats.aio.client import Client

from gpu_worker.consumer.held_request import HeldRequest, log_fields
from gpu_worker.consumer.receipts import ReceiptWriter
from shared.messages import BatchResult, FinishReason, Request
from shared.nats_connection import SEND_ERRORS
from shared.server_clock import ServerClock
from shared.subjects import is_batch_reply

_log = logging.getLogger(__name__)


class ResultMaker:
    """Makes results in the name of one worker."""

    def __init__(
        self, worker: str, chat_format: str, clock: ServerClock, receipts: ReceiptWriter | None = None
    ) -> None:
        self._receipts = receipts or ReceiptWriter()
        self._worker = worker
        self._chat_format = chat_format
        self._clock = clock

    def result(self, held: HeldRequest, reason: FinishReason, num_output: int, error: str | None) -> BatchResult:
        """Return the result of a request that ends now, with `num_output` tokens."""
        request, sequence = held.request, held.sequence
        num_prompt = 0 if sequence is None else sequence.num_prompt_tokens
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
            worker=self._worker,
            created=request.created,
            completed=self._clock.now(),
            vector=held.vector,
            cached_tokens=0 if sequence is None else sequence.num_cached_tokens,
            in_reasoning=held.in_reasoning,
            chat_format=self._chat_format,
            total_logprob=None if request.sampling.logprobs is None else held.total_logprob,
            evicted_tokens=0 if sequence is None else sequence.num_evicted_at(num_output),
            device_s=self._receipts.receipt(held, num_output).device_s,
        )


async def send_result(nats: Client, request: Request, payload: bytes) -> None:
    """Send the encoded result to the reply subject of the request, if it names one that its tenant may use."""
    if request.reply is None or not is_batch_reply(request.reply, request.tenant):
        return
    try:
        await nats.publish(request.reply, payload)
    except SEND_ERRORS as error:
        _log.warning("batch result not sent to its reply subject", extra=log_fields(request) | {"error": repr(error)})
