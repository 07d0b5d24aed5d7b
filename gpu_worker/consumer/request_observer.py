"""What a worker reports of each request when it leaves: a log line, and the spans `queue`, `prefill` and `decode`.

An attempt that was handed over or cancelled is told of too; the next one, here or elsewhere, has lines and spans of its
own with its own epoch. There is no text of prompts or answers in them.
"""

from __future__ import annotations

import time
from functools import partial

from gpu_worker.consumer.held_request import HeldRequest
from shared.request_log import Kind, RequestLog, is_slow
from shared.tracing import AttributeValue, Tracing


class RequestObserver:
    """Tells of requests."""

    def __init__(self, log: RequestLog, worker: str, tracing: Tracing | None = None) -> None:
        self._log = log
        self._worker = worker
        self._tracing = tracing

    def removed(self, held: HeldRequest) -> None:
        """Tell of a request that is not held any more."""
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
