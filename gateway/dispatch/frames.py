"""Frames from the workers: each delta finds its flight, is checked against epoch, holder and sequence, and delivered.

This runs inside the NATS callback, once per engine step and worker. The usual delta takes the short way; claims, ends,
duplicates, gaps and deltas of other attempts take the long one. A delta counts only if it comes from the worker that
holds the current epoch and continues exactly where the last one ended.

A worker's counts of tokens are bounded by what this gateway knows itself, since one worker's lie would close a model or
use up a tenant's tokens. Generated tokens are counted as they come; those of a prompt are bounded by its bytes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
from nats.aio.msg import Msg

from gateway.dispatch.inflight import Flight, FlightTable
from gateway.dispatch.recovery import timeout_error
from gateway.dispatch.revoker import Revoker
from gateway.errors import ApiError
from gateway.metrics import MoveReason
from gateway.telemetry.model_metrics import ModelMetrics
from shared.adapter_calls import ADAPTER_UNAVAILABLE
from shared.disaggregation import KvReady
from shared.log_limit import LogLimit
from shared.media import IMAGE_NOT_FOUND, IMAGES_BUSY
from shared.messages import UNDECODABLE, Delta, Finish, Frame, Request, Usage

STRAY_CANCEL_INTERVAL_S = 1.0
MAX_STRAYS = 10_000
# How far a worker's wall clock may be ahead of ours; beyond that, one of the two has jumped.
EARLY_S = 1.0
# What a worker cannot do at the moment, and after how many seconds clients send the request again by themselves. An
# image that is no longer stored is stored again then.
_PASSING = {IMAGE_NOT_FOUND: 1.0, IMAGES_BUSY: 5.0, ADAPTER_UNAVAILABLE: 5.0}

_logger = logging.getLogger(__name__)


class Endings(Protocol):
    """What happens to a flight when its attempt or the flight itself ends (`Dispatcher`)."""

    def lose(self, flight: Flight, reason: MoveReason, why: str) -> None:
        """Dispatch another attempt for a lost one."""

    def hand_over(self, flight: Flight, ready: KvReady | None) -> None:
        """Dispatch a request that is given back to another worker, which finds the KV of its prompt as `ready`."""

    def complete(self, flight: Flight, delta: Delta) -> None:
        """Deliver the last delta of a flight."""

    def fail(self, flight: Flight, error: ApiError) -> None:
        """Tell the sink of a flight that it cannot be finished."""


class FrameReceiver:
    """Accepts frames on behalf of the flights."""

    def __init__(
        self,
        flights: FlightTable,
        revoker: Revoker,
        endings: Endings,
        serves_another: Callable[[str, str], bool],
        models: Mapping[str, ModelMetrics],
        on_receipt: Callable[[str, Delta, Flight | None], None] = lambda worker, delta, flight: None,
    ) -> None:
        """Deliver to the sinks of `flights`; report ends and losses to `endings`.

        `serves_another` says of a worker and a model whether its heartbeats are those of another model. Gaps between
        deltas are observed in `models`. `on_receipt` is called with each end: its worker, and its flight if that
        has not ended.
        """
        self._by_id = flights.by_id
        self._flights = flights
        self._revoker = revoker
        self._endings = endings
        self._serves_another = serves_another
        self._loop = asyncio.get_running_loop()
        self._decode = msgspec.msgpack.Decoder(Frame).decode
        self._strays: dict[tuple[str, int], float] = {}
        self._log_limit = LogLimit(_logger)
        self._models = models
        self._on_receipt = on_receipt

    def receive(self, message: Msg) -> None:
        """Accept a NATS message; one that is not a frame is logged and dropped."""
        try:
            frame = self._decode(message.data)
        except UNDECODABLE as error:
            self._log_limit.warning(message.subject, "a message on %s is not a frame: %s", message.subject, error)
            return
        self.accept(frame)

    def accept(self, frame: Frame) -> None:
        """Accept all deltas of one engine step."""
        by_id = self._by_id
        # One object for all frames of a worker, so that holders are compared without looking at their names.
        worker = sys.intern(frame.worker)
        now = self._loop.time()
        # Streams of one worker nearly all got their last token with its frame before: their gap is counted once.
        model, since, num_streams = "", -1.0, 0
        for delta in frame.deltas:
            flight = by_id.get(delta.id)
            if flight is None:
                self._refuse(worker, delta, None, now)
                continue
            try:
                emitted = flight.emitted
                if (
                    delta.seq == len(emitted)
                    and delta.finish is None
                    and delta.prompt_tokens is None
                    and delta.evicted is None
                    and delta.token_ids
                    and delta.epoch == flight.epoch
                    and flight.worker == worker
                ):
                    if delta.seq:
                        if flight.progressed_at != since:
                            if num_streams:
                                self._models[model].gap_s.observe(now - since, num_streams)
                            model, since, num_streams = flight.request.model, flight.progressed_at, 0
                        num_streams += 1
                    flight.progressed_at = now
                    emitted += delta.token_ids
                    if flight.awaited_in is not None:
                        self._flights.note_output(flight)
                    flight.sink.deliver(delta)
                else:
                    self._accept_unusual(worker, flight, delta, now)
            except Exception:
                _logger.exception("delta of request %s could not be delivered", delta.id, extra=flight.log_fields)
                self._endings.fail(flight, ApiError(500, "The answer could not be delivered.", code="internal_error"))
        if num_streams:
            self._models[model].gap_s.observe(now - since, num_streams)

    def _accept_unusual(self, worker: str, flight: Flight, delta: Delta, now: float) -> None:
        if delta.epoch != flight.epoch:
            self._refuse(worker, delta, flight, now)
            return
        holder = flight.worker
        if holder is None:
            if self._serves_another(worker, flight.request.model):
                # NATS lets every worker publish frames. One without heartbeats may claim: the first may come later.
                text = "request %s of model %s was claimed by worker %s, which serves another; dropped"
                self._log_limit.warning(worker, text, flight.id, flight.request.model, worker)
                return
            self._flights.claim(flight, worker)
            flight.log.claimed_at = now
        elif holder != worker:
            self._refuse_duplicate(flight, holder, worker, now)
            return
        position = len(flight.emitted)
        if delta.seq < position and delta.seq + len(delta.token_ids) <= position:
            return
        if delta.seq != position:
            self._endings.lose(flight, "gap", f"token {delta.seq} came where {position} was due")
            return
        if holder is not None and _is_announcement(delta):
            flight.heard_at = now
            return
        delta = believable(delta, flight.request, flight.estimated_tokens, position + len(delta.token_ids))
        self._advance(flight, delta, now)
        if delta.finish is not None:
            self._on_receipt(worker, delta, flight)
            self._finish(flight, delta, delta.finish, now)
        elif not _is_announcement(delta):
            flight.sink.deliver(delta)

    def _advance(self, flight: Flight, delta: Delta, now: float) -> None:
        if flight.emitted and (delta.token_ids or delta.finish is None):
            # The claim of a later attempt counts too: its client has waited since the last token of the one before.
            self._models[flight.request.model].gap_s.observe(now - flight.progressed_at)
        flight.progressed_at = now
        flight.emitted += delta.token_ids
        if delta.evicted is not None:
            flight.note_evicted(delta)
        if delta.token_ids and flight.awaited_in is not None:
            self._flights.note_output(flight)
        if delta.prompt_tokens is not None:
            flight.prompt_tokens = delta.prompt_tokens
        if delta.text or delta.prompt_logprobs:
            flight.has_prompt_output = True

    def _finish(self, flight: Flight, delta: Delta, finish: Finish, now: float) -> None:
        if finish.reason in ("stop", "length"):
            self._endings.complete(flight, delta)
        elif finish.reason == "handoff":
            if delta.token_ids or delta.text:
                flight.sink.deliver(msgspec.structs.replace(delta, finish=None))
            self._endings.hand_over(flight, finish.ready)
        elif finish.reason == "expired" and flight.expires_at is not None and now < flight.expires_at - EARLY_S:
            self._endings.lose(
                flight, "early", f"by the clock of {flight.worker or 'its worker'} its deadline has passed"
            )
        elif finish.reason == "expired":
            self._endings.fail(flight, timeout_error())
        elif finish.reason == "failed":
            self._endings.fail(flight, _failure(flight, finish))
        else:
            self._endings.lose(flight, "cancelled", "the worker cancelled it, but this gateway did not")

    def _refuse_duplicate(self, flight: Flight, holder: str, worker: str, now: float) -> None:
        """Drop the tokens of a second worker, to which JetStream has delivered the request too, and stop it.

        Two workers' tokens must not be mixed: their arithmetic may differ.
        """
        if self._may_cancel_again((flight.id, flight.epoch), now):
            text = "request %s is held by %s; what %s computes is dropped"
            _logger.info(text, flight.id, holder, worker, extra=flight.log_fields)
            self._revoker.cancel(flight.request.model, flight.id, flight.epoch, keep=holder)

    def _refuse(self, worker: str, delta: Delta, flight: Flight | None, now: float) -> None:
        """Drop a delta of an attempt that does not count, and tell its worker, at most once per interval."""
        if delta.finish is not None:
            self._on_receipt(worker, delta, flight)
        if delta.finish is not None or (flight is not None and delta.epoch > flight.epoch):
            return
        key = (delta.id, delta.epoch)
        is_first = key not in self._strays
        if not self._may_cancel_again(key, now):
            return
        if flight is not None:
            self._revoker.cancel(flight.request.model, delta.id, delta.epoch)
        elif not is_first:
            # Not for the first one: a worker may send one more while the cancellation is on its way.
            self._revoker.cancel_again(delta.id, delta.epoch)

    def _may_cancel_again(self, attempt: tuple[str, int], now: float) -> bool:
        last = self._strays.get(attempt)
        if last is not None and now - last < STRAY_CANCEL_INTERVAL_S:
            return False
        if len(self._strays) >= MAX_STRAYS:
            self._strays.clear()
        self._strays[attempt] = now
        return True


def _failure(flight: Flight, finish: Finish) -> ApiError:
    if (retry_after_s := _PASSING.get(finish.error_code or "")) is not None:
        message = finish.error or "The request cannot be served at the moment."
        return ApiError(503, message, code=finish.error_code, retry_after_s=retry_after_s)
    if finish.error_param is not None:
        message, code = finish.error or "The request cannot be served.", finish.error_code or "invalid_value"
        return ApiError(400, message, param=finish.error_param, code=code)
    _logger.error("request %s failed in its worker: %s", flight.id, finish.error, extra=flight.log_fields)
    return ApiError(500, "The worker failed at this request.", code="worker_failed")


def _is_announcement(delta: Delta) -> bool:
    """Whether a delta only names the holder of a request: its prompt has not been read yet, or it waits there."""
    return delta.finish is None and delta.prompt_tokens is None and not (delta.token_ids or delta.text)


# Tokens of a chat template's own text: a model's default instructions, how tools are called.
_TEMPLATE_TOKENS = 16_384
# A template may write a text twice, or indent it (tools).
_TEMPLATE_COPIES = 4
# Beginning and end of a text, the marks of a text with a gap.
_SPECIAL_TOKENS = 64
# Unicode's compatibility forms, which some tokenizers make of a text, have at most 18 characters for one.
_MOST_EXPANSION = 18
_CHARACTER_BYTES = 4
# Drafts that were rejected for one token that came.
_MOST_DRAFTS = 64


def most_prompt_tokens(request: Request) -> int:
    """Return how many tokens a request's prompt has at most; a token is made of a byte or more."""
    if request.token_ids is not None:
        # Of an empty prompt the worker makes one that begins a text.
        return max(1, len(request.token_ids))
    if request.text is not None:
        scored = () if request.pooling is None else (request.pooling.query, request.pooling.instruction)
        num_bytes = sum(map(_most_bytes, (request.text, request.suffix, *scored)))
        return num_bytes + (_SPECIAL_TOKENS if request.pooling is None else _TEMPLATE_TOKENS)
    num_bytes = 0
    for message in request.messages or ():
        num_bytes += sum(map(_most_bytes, (message.role, message.content, message.name, message.reasoning)))
        num_bytes += _SPECIAL_TOKENS + _most_bytes(message.tool_call_id)
        num_bytes += sum(sum(map(_most_bytes, (call.id, call.name, call.arguments))) for call in message.tool_calls)
    if request.chat is not None:
        num_bytes += sum(map(_most_bytes, (request.chat.tools, request.chat.variables, request.chat.template)))
    return _TEMPLATE_COPIES * num_bytes + _TEMPLATE_TOKENS


def believable(delta: Delta, request: Request, estimated_tokens: int, num_emitted: int) -> Delta:
    """Return a delta with the figures that can be true.

    Args:
        delta: As its worker sent it.
        request: Its request.
        estimated_tokens: The gateway's estimate of the prompt, from its bytes alone.
        num_emitted: Tokens that have come, this delta's among them.
    """
    usage = None if delta.finish is None else delta.finish.usage
    claimed = max(delta.prompt_tokens or 0, 0 if usage is None else usage.prompt_tokens)
    # Nearly every claim is below an estimate that is there already.
    most = claimed if claimed <= estimated_tokens else most_prompt_tokens(request)
    if delta.prompt_tokens is not None and delta.prompt_tokens > most:
        delta = msgspec.structs.replace(delta, prompt_tokens=most)
    if delta.finish is None or usage is None:
        return delta
    true = _bounded(usage, most, num_emitted)
    if true == usage:
        return delta
    return msgspec.structs.replace(delta, finish=msgspec.structs.replace(delta.finish, usage=true))


def _bounded(usage: Usage, most_prompt: int, num_emitted: int) -> Usage:
    prompt = min(usage.prompt_tokens, most_prompt)
    return Usage(
        prompt,
        num_emitted,
        min(usage.cached_tokens, prompt),
        min(usage.accepted_prediction_tokens, num_emitted),
        min(usage.rejected_prediction_tokens, _MOST_DRAFTS * (num_emitted + 1)),
        min(usage.evicted_tokens, prompt + num_emitted),
        usage.evicted_by,
    )


def _most_bytes(text: str | None) -> int:
    if text is None:
        return 0
    return len(text) if text.isascii() else _MOST_EXPANSION * _CHARACTER_BYTES * len(text)
