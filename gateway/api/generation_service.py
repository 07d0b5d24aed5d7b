"""A generation from its request's bytes to the end of its answer. `GenerationService.serve` reads top to bottom.

Nothing costly happens before admission. The coroutine of a request sleeps from the start of its generation until the
answer has ended: tokens go from the NATS callback to the transport without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from msgspec import Struct

from gateway.admission.auth import Principal
from gateway.admission.caller import Caller
from gateway.admission.hold_times import AnswerPlaces
from gateway.admission.limits import Lease, reserved_tokens
from gateway.admission.shedding import Shedder
from gateway.aliases.book import ArmProbe, conversation_of
from gateway.aliases.table import no_such_model
from gateway.api.answer import Answer, Asked, Outcome, ResponseHead, StreamParts
from gateway.api.door import CLIENT_LEFT
from gateway.api.endpoint import (
    Endpoint,
    GenerationLog,
    GenerationStart,
    IdempotencyKey,
    LoggedGeneration,
    RepeatedError,
    idempotency_key,
)
from gateway.api.generation_starter import GenerationStarter, Membership
from gateway.api.model_fit import ModelReading, check_sees, with_adapter, with_watermark
from gateway.api.request_observer import RequestObserver, RequestRecord
from gateway.api.routes import RouteServices
from gateway.api.usage import count_answer
from gateway.dispatch.dispatcher import Dispatcher
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation
from gateway.http1.exchange import Exchange
from gateway.http1.head import REQUEST_ID
from gateway.streams.event_stream import EventStreamLimits, Flusher
from shared.media import IMAGE_NOT_FOUND

TICK_S = 0.25
# As Stripe's API tells it.
_REPLAYED = (b"idempotent-replayed", b"true")

_logger = logging.getLogger(__name__)


class _Visit(Struct):
    endpoint: Endpoint
    exchange: Exchange
    head: ResponseHead
    record: RequestRecord
    principal: Principal
    body: bytes
    key: IdempotencyKey | None = None
    probe: ArmProbe | None = None

    def failed(self, error: ApiError) -> None:
        self.record.failed(error)
        if self.probe is not None:
            self.probe.failed(error)


class GenerationService:
    """Serves every endpoint that generates. Owns the places for answers, and the streams that run."""

    def __init__(
        self,
        services: RouteServices,
        dispatcher: Dispatcher,
        shedder: Shedder,
        starter: GenerationStarter,
        observer: RequestObserver,
        logged: GenerationLog,
    ) -> None:
        config = services.config
        self._services = services
        self._dispatcher = dispatcher
        self._shedder = shedder
        self._starter = starter
        self._observer = observer
        self._logged = logged
        self._metrics = services.metrics
        self._reading = ModelReading()
        self._loop = asyncio.get_running_loop()
        self._flusher = Flusher(self._loop)
        self._stream_limits = EventStreamLimits(config.stream_buffer_bytes, config.send_timeout_s)
        self._places = AnswerPlaces(config.max_streams)
        self._streamed: set[Answer] = set()

    async def tick_forever(self) -> None:
        """Let streams react to silence and slow readers.

        A status of 200 promises an answer. While NATS owes one or is away, a request may yet be refused with a status
        of its own and Retry-After, so its stream is not begun.
        """
        watch = self._dispatcher.nats_watch
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            is_queue_late = watch.owes_answer or not watch.is_connected
            for answer in list(self._streamed):
                if is_queue_late and not answer.has_begun:
                    continue
                try:
                    answer.tick(now)
                except Exception:
                    _logger.exception("a stream could not be looked after")

    async def serve(self, endpoint: Endpoint, exchange: Exchange, head: ResponseHead) -> None:
        """Answer one request: who asks, what for, within which limits; then its deltas flow until it has ended.

        Raises:
            ApiError: It is refused.
            ClientGoneError: The client left before its request was complete.
        """
        head.route = endpoint.name
        head.record = self._observer.begin(endpoint.name, head.request_id, exchange.head.headers)
        services = self._services
        principal = services.keys.authenticate(exchange.head.headers, exchange.head.notes)
        body = await exchange.read_body(services.config.max_body_bytes, principal.body_owner, services.bodies)
        key = idempotency_key(exchange.head.headers, endpoint.name, body) if endpoint.is_logged else None
        visit = _Visit(endpoint, exchange, head, head.record, principal, body, key)
        # The body is the visit's alone, which lets go of it: a stream may last for minutes.
        del body
        place = self._places.take(principal.key_id)
        self._metrics.active_streams += 1
        try:
            rules = services.body_rules(principal, head.model)
            generation = await endpoint.generation(visit.body, principal, rules)
            if services.aliases.table.aliases:
                generation = await self._resolved(visit, generation)
            visit.record.tenant, visit.record.generation = principal.tenant, generation
            principal.check_model(generation.name)
            principal.check_priority(generation.priority)
            head.status = await self._answer(visit, generation)
        except ApiError as error:
            if visit.probe is not None:
                visit.probe.failed(error)
            raise
        finally:
            self._places.give_back(principal.key_id, place)
            self._metrics.active_streams -= 1

    async def _resolved(self, visit: _Visit, generation: Generation) -> Generation:
        services, tenant, fleet = self._services, visit.principal.tenant, self._dispatcher.fleet
        conversation = b""
        if services.aliases.has_canary(generation, tenant, fleet):
            read = partial(conversation_of, generation, visit.body)
            conversation = await services.bodies.read_kept(tenant, len(visit.body), read)
        generation, visit.probe = services.aliases.split(generation, tenant, fleet, conversation)
        return generation

    async def show(
        self, endpoint: Endpoint, logged: LoggedGeneration, exchange: Exchange, head: ResponseHead, principal: Principal
    ) -> int:
        """Answer with a generation that was begun by another request, and return the status for metrics.

        Raises:
            ApiError: The key has read enough for now; or the generation cannot be shown.
        """
        answer = self._new_answer(endpoint, logged.asked(exchange, head, principal))
        self._streamed.add(answer)
        try:
            with logged.kept():
                # A client that is paused holds no turn.
                await logged.read_stored(self._services.reads.turn(principal, "resumptions"))
                await logged.join(answer)
            outcome = await answer.done
        except ApiError as error:
            answer.fail(error)
            return error.status
        finally:
            self._logged.leave(logged, answer)
            self._streamed.discard(answer)
            answer.close()
        return self._status_of(answer, outcome)

    async def _answer(self, visit: _Visit, generation: Generation) -> int:
        if visit.key is not None and (kept := await self._logged.repeated(visit.principal, visit.key)) is not None:
            return await self._repeat(visit, kept)
        generation, load = await self._fitted(visit, generation)
        tokens_used: int | None = 0
        tokens, output = reserved_tokens(generation)
        lease = await self._services.limiter.admit(visit.principal, generation.num_at_once, tokens, output)
        is_lent = False
        try:
            visit.head.limits = lease.headers
            if load is None:
                raise no_such_model(generation.name, generation.model)
            generation = await self._read(generation, load, visit.principal)
            visit.head.first_event = 0 if generation.is_resumable else None
            asked = Asked(visit.exchange, generation, visit.head, visit.principal, load.fingerprint)
            answer = self._new_answer(visit.endpoint, asked)
            tokens_used = None
            try:
                membership = await self._start(visit, asked, answer, load, lease)
                is_lent = membership.is_counted
                visit.record.source = "cache" if membership.is_repeated else "generated"
                outcome = await self._ended(visit, answer, membership, is_streamed=generation.stream)
                tokens_used = _tokens_used(answer, membership, outcome)
                return self._note(visit, generation, answer, membership, outcome)
            except RepeatedError as repeated:
                tokens_used = 0
                return await self._repeat(visit, repeated.generation)
            except ApiError as error:
                # Not admitted. The answer may have begun with a keep-alive meanwhile, so it must say so itself.
                tokens_used = 0
                visit.failed(error)
                answer.fail(error)
                return error.status
            finally:
                self._streamed.discard(answer)
                answer.close()
        finally:
            if not is_lent:
                lease.release(tokens_used)

    async def _fitted(self, visit: _Visit, generation: Generation) -> tuple[Generation, FleetLoad | None]:
        """Return a generation as it fits its model, and the model's load after that: it may have waited for one."""
        fleet, principal = self._dispatcher.fleet, visit.principal
        generation = with_adapter(generation, fleet, principal.tenant)
        load = fleet.reported_load(generation.served_model)
        generation = await visit.endpoint.fitted(generation, load, principal, self._services)
        return generation, fleet.reported_load(generation.served_model)

    async def _read(self, generation: Generation, load: FleetLoad, principal: Principal) -> Generation:
        generation = with_watermark(generation, principal.watermark)
        if generation.has_images:
            for prompt in generation.prompts:
                check_sees(prompt.images, load.model, load)
            generation = await self._services.images.stored(generation, principal.tenant)
        return await self._reading.read(generation, load)

    async def _repeat(self, visit: _Visit, kept: LoggedGeneration) -> int:
        exchange, head = visit.exchange, visit.head
        visit.body = b""
        names = {REQUEST_ID, *head.dialect.id_headers}
        others = [header for header in exchange.more_headers if header[0] not in names]
        exchange.more_headers = [*others, *((name, kept.request_id.encode()) for name in names), _REPLAYED]
        asked = kept.asked(exchange, head, visit.principal)
        head.first_event = 0 if asked.generation.is_resumable else None
        return await self.show(visit.endpoint, kept, exchange, head, visit.principal)

    def _new_answer(self, endpoint: Endpoint, asked: Asked) -> Answer:
        if not asked.generation.stream:
            return endpoint.whole_answer(asked)
        return endpoint.streamed_answer(asked, StreamParts(self._flusher, self._stream_limits, self._loop.time()))

    async def _start(self, visit: _Visit, asked: Asked, answer: Answer, load: FleetLoad, lease: Lease) -> Membership:
        generation, endpoint = asked.generation, visit.endpoint
        is_logged = endpoint.is_logged and (generation.is_resumable or visit.key is not None)
        principal, record, headers = visit.principal, visit.record, visit.exchange.head.headers
        # A random answer is never kept, so there is none that could be passed by.
        is_fresh = generation.deterministic and any(
            name == b"cache-control" and b"no-cache" in value.lower() for name, value in headers
        )
        who, names = (principal.key_id, principal.tenant), (visit.head.request_id, record.traceparent)
        caller = Caller(*who, headers, visit.body, *names, principal.weight, record.key, visit.probe)
        start = GenerationStart(generation, load, answer, caller, is_fresh)
        if is_logged:
            return await self._logged.start_logged(endpoint.name, start, asked, lease, visit.key)
        return await endpoint.start(self._starter, start)

    async def _ended(self, visit: _Visit, answer: Answer, membership: Membership, *, is_streamed: bool) -> Outcome:
        visit.body = b""
        try:
            visit.record.dispatched_at = time.monotonic()
            if is_streamed:
                # Not before it was admitted: until then it may be refused, with a status of its own.
                self._streamed.add(answer)
            answer.make_ready()
            return await answer.done
        finally:
            membership.leave()

    def _note(
        self, visit: _Visit, generation: Generation, answer: Answer, membership: Membership, outcome: Outcome
    ) -> int:
        metrics, record, head, usage = self._metrics, visit.record, visit.head, answer.usage
        if answer.first_token_at is not None:
            ttft_s = answer.first_token_at - head.started
            metrics.by_model.models[generation.model].ttft_s.observe(ttft_s)
            if membership.prediction is not None:
                self._shedder.observe(membership.prediction, ttft_s, usage.prompt_tokens, usage.completion_tokens)
        # The log has only counts by workers: an answer that was broken off has no count of cached tokens.
        record.usage = usage if usage.is_known else None
        if _is_broken_off(answer, outcome):
            usage.count_delivered(*membership.delivered())
        record.outcome = outcome.value
        if answer.error is not None:
            record.failed(answer.error)
            if answer.error.code == IMAGE_NOT_FOUND:
                media = (ref for prompt in generation.prompts for ref in prompt.media)
                self._services.images.forget(media, visit.principal.tenant)
        is_complete = outcome is Outcome.COMPLETED
        if visit.probe is not None and record.source == "generated" and (is_complete or answer.error is not None):
            visit.probe.ended(answer.error, head.started, answer.first_token_at, usage.completion_tokens)
        # A refused request has no answer to count; its client may have made the model's name up.
        is_answered = answer.error is None or answer.first_token_at is not None or usage.prompt_tokens > 0
        if is_answered and not membership.is_counted_elsewhere and not visit.principal.is_probe:
            count_answer(metrics, generation, record.tenant or "", usage, head.started, is_complete=is_complete)
        return self._status_of(answer, outcome)

    def _status_of(self, answer: Answer, outcome: Outcome) -> int:
        if outcome is Outcome.DISCONNECTED:
            self._metrics.disconnects += 1
            return CLIENT_LEFT
        if outcome is Outcome.SLOW_READER:
            self._metrics.slow_readers += 1
            return 408
        return 200 if answer.error is None else answer.error.status


def _is_broken_off(answer: Answer, outcome: Outcome) -> bool:
    """Whether the client broke an answer off, or its deadline passed: the tokens delivered until then count."""
    failed = outcome is Outcome.FAILED and answer.error is not None and answer.error.status != 408
    return outcome is not Outcome.COMPLETED and not failed


def _tokens_used(answer: Answer, membership: Membership, outcome: Outcome) -> int:
    """Return the tokens that an answer counts against its key's limit per minute.

    A complete answer counts as its usage says, one from the cache too. One that failed costs nothing, unless it is the
    client's own fault after its text had begun: an answer that ends in its own grammar's error would be free.
    """
    if outcome is Outcome.COMPLETED:
        return answer.num_tokens
    error, has_text = answer.error, answer.first_token_at is not None
    is_own_fault = has_text and error is not None and error.status < 500
    return membership.tokens_used() if is_own_fault or _is_broken_off(answer, outcome) else 0
