"""What a worker reports of each request when it leaves: a receipt, a log line, and spans `queue`, `prefill`, `decode`.

An attempt that was handed over or cancelled is reported too; the next one, here or elsewhere, has its own lines and
spans with its own epoch. They contain no text of prompts or answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from gpu_worker.consumer.held_request import HeldRequest
from gpu_worker.core.sequence import PrefillRecord
from shared.bounds import MAX_DURATION_S
from shared.receipt import PrefillPart, Receipt
from shared.request_log import Kind, RequestLog, is_slow
from shared.tracing import AttributeValue, Tracing


class RequestObserver:
    """Reports requests."""

    def __init__(self, log: RequestLog, worker: str, tracing: Tracing | None = None) -> None:
        self._log = log
        self._worker = worker
        self._tracing = tracing

    def removed(self, held: HeldRequest) -> None:
        """Report a request that is not held any more."""
        traceparent = held.request.traceparent
        self._log.write("request", partial(_fields, held), _kind(held))
        if self._tracing is not None and traceparent is not None:
            self._add_spans(self._tracing, held, traceparent)

    def _add_spans(self, tracing: Tracing, held: HeldRequest, parent: str) -> None:
        now, request, sequence = time.monotonic(), held.request, held.sequence
        scheduled_at = None if sequence is None else sequence.scheduled_at
        names: dict[str, AttributeValue | None] = {
            "gen_ai.request.model": request.model,
            "headrace.request_id": request.trace,
            "headrace.sequence_id": request.id,
            "headrace.worker": self._worker,
            "headrace.epoch": request.epoch,
            "headrace.lane": request.lane,
        }
        error = "the request failed here" if held.outcome == "failed" else None
        sent_at = held.taken_at - held.queued_s
        tracing.add("queue", parent, sent_at, scheduled_at or now, names, None if scheduled_at else error)
        if sequence is None or scheduled_at is None:
            return
        first_at = held.first_output_at
        prompt: dict[str, AttributeValue | None] = {
            "gen_ai.usage.input_tokens": sequence.num_prompt_tokens,
            "headrace.cached_tokens": sequence.num_cached_tokens,
        }
        tracing.add("prefill", parent, scheduled_at, first_at or now, names | prompt, None if first_at else error)
        if first_at is not None:
            output: dict[str, AttributeValue | None] = {
                "gen_ai.usage.output_tokens": sequence.num_output_tokens,
                "gen_ai.response.finish_reasons": [held.outcome],
                "headrace.preemptions": sequence.num_preemptions,
            }
            tracing.add("decode", parent, first_at, now, names | output, error)


def _kind(held: HeldRequest) -> Kind:
    now = time.monotonic()
    ttft_s = None if held.first_output_at is None else held.first_output_at - held.taken_at
    if held.outcome in ("failed", "expired"):
        return "problem"
    if held.request.lane == "batch":
        return "batch"
    return "problem" if is_slow(ttft_s, now - held.taken_at) else "request"


def _fields(held: HeldRequest) -> dict[str, object]:
    now, request, sequence = time.monotonic(), held.request, held.sequence
    fields: dict[str, object] = {
        "request_id": request.trace,
        "id": request.id,
        "epoch": request.epoch,
        "lane": request.lane,
        "tenant": request.tenant,
        "outcome": held.outcome,
        "held_s": now - held.taken_at,
    }
    if sequence is not None:
        fields["prompt_tokens"] = sequence.num_prompt_tokens
        fields["cached_tokens"] = sequence.num_cached_tokens
        fields["completion_tokens"] = sequence.num_output_tokens
        if sequence.scheduled_at is not None:
            first_at = held.first_output_at or now
            fields["waited_s"] = sequence.scheduled_at - held.taken_at
            fields["prefill_s"] = first_at - sequence.scheduled_at
            fields["decode_s"] = now - first_at
    return fields


class ReceiptWriter:
    """Writes receipts of one worker."""

    def __init__(self, num_devices: int = 1, watts: Callable[[], float | None] = lambda: None) -> None:
        """Count the seconds of a step for each device; `watts` is the power that one of them has drawn lately."""
        self._num_devices = num_devices
        self._watts = watts

    def receipt(self, held: HeldRequest, num_output_tokens: int) -> Receipt:
        """Return the receipt of a request that ends now; it pays for no further step."""
        taken_at, sequence = held.taken_at, held.sequence
        taken = time.time() - (time.monotonic() - taken_at)
        # A sender may say that it has made the request at any time.
        ended_s, queued_s = time.monotonic() - taken_at, min(held.queued_s, MAX_DURATION_S)
        waited_s = max(0.0, taken_at - held.message.came_at)
        if sequence is None or held.admitted_at is None:
            return Receipt(taken=taken, queued_s=queued_s, waited_s=waited_s, ended_s=ended_s)
        sequence.record.is_closed = True
        record, devices, watts = sequence.record, self._num_devices, self._watts()
        device_s = record.device_s * devices
        return Receipt(
            taken=taken,
            queued_s=queued_s,
            waited_s=waited_s,
            admitted_s=held.admitted_at - taken_at,
            scheduled_s=_since(taken_at, sequence.scheduled_at),
            first_s=_since(taken_at, held.first_output_at),
            ended_s=ended_s,
            num_devices=devices,
            device_s=device_s,
            prefill_s=record.prefill_s * devices,
            rejected_s=record.rejected_s * devices,
            recomputed_s=record.recomputed_s * devices,
            energy_j=None if watts is None else watts * device_s,
            prompt_tokens=sequence.num_prompt_tokens,
            cached_tokens=sequence.num_cached_tokens,
            output_tokens=num_output_tokens,
            drafted_tokens=sequence.num_drafted_tokens,
            accepted_tokens=min(sequence.num_accepted_tokens, num_output_tokens),
            prefills=tuple([_shown(part, taken_at) for part in record.prefills]),
            preempted_s=tuple([max(0.0, at - taken_at) for at in record.preempted_at]),
        )


def _shown(part: PrefillRecord, taken_at: float) -> PrefillPart:
    return PrefillPart(max(0.0, part.began_at - taken_at), max(0.0, part.landed_at - part.began_at), part.num_tokens)


def _since(taken_at: float, moment: float | None) -> float | None:
    return None if moment is None else max(0.0, moment - taken_at)
