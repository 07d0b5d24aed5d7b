"""The routes that generate: from a request's bytes to an answer that the data path fills in.

Authenticate, read, take a place, parse, limits, then start the generation. Nothing costly happens before admission. The
coroutine of a request then sleeps until its answer has ended: tokens go from the NATS callback to the transport without
it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from gateway.admission.auth import KeyStore, Principal
from gateway.admission.caller import Caller
from gateway.admission.limits import Lease, RateLimiter, reserved_tokens
from gateway.admission.shedding import Shedder
from gateway.api.answer import Answer, Outcome, ResponseHead
from gateway.api.answer_places import AnswerPlaces
from gateway.api.counting import count_answer
from gateway.api.door import CLIENT_LEFT
from gateway.api.endpoint import Asked, Endpoint, StreamParts
from gateway.api.generation_starter import GenerationStarter, Membership
from gateway.api.repeated_requests import RepeatedAnswer, Traits
from gateway.api.request_observer import RequestObserver, RequestRecord
from gateway.api.schemas.known_names import STRICT, BodyRules
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.http1.exchange import Exchange
from gateway.metrics import GatewayMetrics
from gateway.streams.event_stream import EventStreamLimits, Flusher

TICK_S = 0.25

_logger = logging.getLogger(__name__)


class GenerationService:
    """Serves every endpoint that generates."""

    def __init__(
        self,
        config: GatewayConfig,
        keys: KeyStore,
        limiter: RateLimiter,
        shedder: Shedder,
        starter: GenerationStarter,
        metrics: GatewayMetrics,
        observer: RequestObserver,
        rules: Callable[[Principal, str | None], BodyRules] = lambda principal, model: STRICT,
    ) -> None:
        """Serve with these parts; `tick_forever` must run beside.

        `rules` returns how the body of a key is read, if the path names this model.
        """
        self._config = config
        self._keys = keys
        self._limiter = limiter
        self._shedder = shedder
        self._starter = starter
        self._metrics = metrics
        self._observer = observer
        self._rules = rules
        self._loop = asyncio.get_running_loop()
        self._flusher = Flusher(self._loop)
        self._stream_limits = EventStreamLimits(config.stream_buffer_bytes, config.send_timeout_s)
        self._places = AnswerPlaces(config.max_streams)
        self._streamed: set[Answer] = set()

    async def tick_forever(self) -> None:
        """Let streams react to silence and slow readers.

        A status that says 200 promises an answer. While NATS owes one or is away, what has been asked may yet be
        refused with the status of that, and Retry-After: its stream is not begun.
        """
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            is_queue_late = self._starter.is_queue_late
            for answer in list(self._streamed):
                if is_queue_late and not answer.has_begun:
                    continue
                try:
                    answer.tick(now)
                except Exception:
                    _logger.exception("a stream could not be looked after")

    async def serve(self, endpoint: Endpoint, exchange: Exchange, head: ResponseHead) -> None:
        """Answer one request.

        Raises:
            ApiError: It is refused.
            ClientGoneError: The client left before its request was complete.
        """
        head.route = endpoint.name
        head.record = record = self._observer.begin(endpoint.name, head.request_id, exchange.head.headers)
        head.status = await self._answer(endpoint, exchange, head, record)

    async def _answer(self, endpoint: Endpoint, exchange: Exchange, head: ResponseHead, record: RequestRecord) -> int:
        principal = self._keys.authenticate(exchange.head.headers, exchange.head.notes)
        body = await exchange.read_body(self._config.max_body_bytes, principal.body_owner)
        place = self._take_place(principal.key_id)
        try:
            generation, known = await self._read(endpoint, exchange, head, principal, body, record)
            is_new = known is None and generation.deterministic
            traits = self._starter.repeated.traits(generation.model) if is_new else None
            generation, lease = await self._admit(principal, generation, is_read=known is not None)
            head.limits = lease.headers
            asked = Asked(exchange, generation, head, principal, self._starter.fingerprint(generation.model))
            answer = self._new_answer(endpoint, asked)
            tokens_used: int | None = None
            try:
                if known is None:
                    membership = await self._start(endpoint, asked, answer, body, record.traceparent, traits)
                else:
                    membership = self._starter.repeat(known, answer.sinks)
                self._begin(answer, record, is_streamed=generation.stream)
                # A stream may last for minutes: it does not keep its request's bytes.
                del body, asked
                try:
                    outcome = await answer.done
                finally:
                    membership.leave()
                tokens_used = _tokens_used(answer, membership, outcome)
                return self._note(record, generation, answer, membership, outcome, head)
            except ApiError as error:
                # Not admitted. The answer may have begun with a keep-alive meanwhile, so it must say so itself.
                tokens_used = 0
                record.failed(error)
                answer.fail(error)
                return error.status
            finally:
                self._streamed.discard(answer)
                answer.close()
                lease.release(tokens_used)
        finally:
            self._give_place_back(principal.key_id, place)

    async def _read(
        self,
        endpoint: Endpoint,
        exchange: Exchange,
        head: ResponseHead,
        principal: Principal,
        body: bytes,
        record: RequestRecord,
    ) -> tuple[Generation, RepeatedAnswer | None]:
        """Return what is asked for, and the answer if the same was answered from the cache lately, and may be again."""
        known = None
        if endpoint.is_repeatable and head.model is None:
            known = self._starter.repeated.find(endpoint.name, principal.tenant, body)
        # A body that names no model is read by the models that its key may use.
        if known is not None and (_wants_fresh(exchange.head.headers) or not principal.can_use(known.generation.model)):
            known = None
        if known is None:
            generation = await endpoint.generation(body, principal, self._rules(principal, head.model))
        else:
            generation = known.generation
        record.parsed(principal, generation)
        principal.check_model(generation.model)
        return generation, known

    async def _start(
        self,
        endpoint: Endpoint,
        asked: Asked,
        answer: Answer,
        body: bytes,
        traceparent: str | None,
        traits: Traits | None,
    ) -> Membership:
        """Let a generation begin; `traits` are those of its model with which it was read."""
        generation, principal, headers = asked.generation, asked.principal, asked.exchange.head.headers
        caller = Caller(principal.key_id, principal.tenant, headers, body, asked.head.request_id, traceparent)
        # A random answer is shared with nobody, so there is no kept one to pass by.
        is_fresh = generation.deterministic and _wants_fresh(headers)
        membership = await endpoint.start(self._starter, asked, answer, caller, is_fresh)
        key = membership.cache_key
        is_repeatable = endpoint.is_repeatable and asked.head.model is None
        if is_repeatable and key is not None and traits is not None:
            self._starter.repeated.keep(endpoint.name, caller.tenant, caller.body, generation, key, traits)
        return membership

    async def _admit(self, principal: Principal, generation: Generation, *, is_read: bool) -> tuple[Generation, Lease]:
        """Count a generation against its key's limits, and return it with what its model's chat format needs."""
        principal.check_priority(generation.priority)
        lease = await self._limiter.admit(principal, generation.num_at_once, reserved_tokens(generation))
        if is_read:
            return generation, lease
        try:
            return await self._starter.with_reading(generation), lease
        except BaseException:
            lease.release(0)
            raise

    def _take_place(self, key_id: str) -> object:
        """Count a request among those that are answered, once it has arrived whole."""
        place = self._places.take(key_id)
        self._metrics.active_streams = self._places.num_used
        return place

    def _give_place_back(self, key_id: str, place: object) -> None:
        self._places.give_back(key_id, place)
        self._metrics.active_streams = self._places.num_used

    def _new_answer(self, endpoint: Endpoint, asked: Asked) -> Answer:
        if not asked.generation.stream:
            return endpoint.whole_answer(asked)
        parts = StreamParts(self._flusher, self._stream_limits, self._loop.time())
        return endpoint.streamed_answer(asked, parts)

    def _begin(self, answer: Answer, record: RequestRecord, *, is_streamed: bool) -> None:
        """Look after an answer that is admitted: what is not may yet be refused, with a status of its own."""
        record.dispatched_at = time.monotonic()
        if is_streamed:
            self._streamed.add(answer)
        answer.make_ready()

    def _note(
        self,
        record: RequestRecord,
        generation: Generation,
        answer: Answer,
        membership: Membership,
        outcome: Outcome,
        head: ResponseHead,
    ) -> int:
        """Count what became of an answer, and return the status it stands for."""
        metrics = self._metrics
        usage = answer.usage
        # No count is better than one of none: a client may leave a stream of a thousand tokens.
        record.usage = usage if usage.is_known else None
        record.outcome = outcome.value
        if answer.error is not None:
            record.failed(answer.error)
        is_complete = outcome is Outcome.COMPLETED
        # What was refused has no answer to count; its client may have made the model's name up.
        if answer.error is None or answer.first_token_at is not None or usage.prompt_tokens:
            count_answer(metrics, generation, record.tenant or "", usage, head.started, is_complete=is_complete)
        if answer.first_token_at is not None:
            ttft_s = answer.first_token_at - head.started
            record.first_token_at = record.began_at + ttft_s
            metrics.by_model.model(generation.model).ttft_s.observe(ttft_s)
            if membership.prediction is not None:
                self._shedder.observe(membership.prediction, ttft_s, usage.prompt_tokens, usage.completion_tokens)
        if outcome is Outcome.DISCONNECTED:
            metrics.disconnects += 1
            return CLIENT_LEFT
        if outcome is Outcome.SLOW_READER:
            metrics.slow_readers += 1
            return 408
        return 200 if answer.error is None else answer.error.status


def _tokens_used(answer: Answer, membership: Membership, outcome: Outcome) -> int:
    """Return what an answer counts against its key's tokens per minute.

    A complete answer counts as its usage says, one from the cache too. One that the client broke off, or whose time was
    over, counts what was computed for it. One that failed costs nothing.
    """
    if outcome is Outcome.COMPLETED:
        return answer.num_tokens
    if outcome is Outcome.FAILED and answer.error is not None and answer.error.status != 408:
        return 0
    return membership.tokens_used()


def _wants_fresh(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"cache-control" and b"no-cache" in value.lower() for name, value in headers)
