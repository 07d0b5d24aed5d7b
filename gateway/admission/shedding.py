"""Overload, answered before it costs anything: refuse what would come too late, and keep a place for it.

`forecast` predicts the effect of an admission; `reservations` holds the return times given to refused clients. A client
that returns on time is admitted before newcomers, who are admitted only while every promise can still be kept, or
while the fleet would otherwise run idle. A promise stands even if the fleet has become half as fast since it was made:
its client then waits in the queue, at most its promised wait plus 2.5 objectives (decision 0017).
An unknown rate promises nothing; the queue bounds always hold.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from gateway.admission.caller import Caller
from gateway.admission.forecast import Excess, Experience, Forecast, forecast, outlook, tenant_excess
from gateway.admission.reservations import Reservation, ReservationBook, RetryAdvice, Size
from gateway.admission.shared_places import SharedPlaces
from gateway.config import GatewayConfig
from gateway.errors import ApiError, cannot_start, model_not_found, whole_seconds
from gateway.fleet.fleet_load import FleetLoad
from gateway.fleet.worker_needs import Outlook
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from shared.hosted_models import HostedModel, HostedState

JITTER = 0.25
MAX_RETRY_S = 60.0
UNKNOWN_RETRY_S = 2.0

# By how much of the objective the queue may be too long for a client with a promised place, because predictions err.
# The longer ago a promise was made, the more could be promised to others before it: that time comes on top.
PROMISE_TOLERANCE = 1.5
# The same where the queue is as long as it may be in requests or tokens, which bounds memory and not only time.
FULL_QUEUE_TOLERANCE = 0.5
# With a queue shorter than this part of the objective, newcomers are let in whatever is promised for later.
IDLE_SHARE = 0.25
# Why a model of a host does not serve yet, where it is not being loaded.
_WHY: Mapping[HostedState, str] = MappingProxyType(
    {"no_room": "nothing can give way to it yet", "stopping": "it is being stopped, and is loaded again then"}
)


class Prediction(Struct, frozen=True):
    """The times predicted for an admitted request; `ttft_s` is None while the fleet's rates are unknown."""

    model: str
    ttft_s: float | None
    estimated_prompt_tokens: int
    num_sequences: int
    wait_s: float = 0.0
    own_s: float = 0.0


class Shedder:
    """Admits requests while the fleet can serve them in time. Owns the experience and the reservations by model."""

    def __init__(
        self,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        uniform: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
        places: SharedPlaces | None = None,
    ) -> None:
        self._places = places
        self._config = config
        self._metrics = metrics
        self._uniform = uniform
        self._clock = clock
        self._experience: dict[str, Experience] = {}
        self._books: dict[str, ReservationBook] = {}

    async def recall(self, load: FleetLoad | None, generation: Generation, caller: Caller) -> bool:
        """Look whether another gateway has promised this caller a place; return whether that took time.

        It costs nothing while no request is refused.
        """
        book = None if load is None or load.num_gateways == 1 else self._books.get(load.model)
        if not book or load is None or self._places is None or caller.is_retry is False:
            return False
        if book.find(caller, _size(generation), self._clock()) is not None:
            return False
        reservation = await self._places.take(load.model, caller)
        if reservation is not None:
            book.adopt(reservation)
        return True

    def admit(
        self,
        load: FleetLoad | None,
        generation: Generation,
        caller: Caller,
        share: FleetLoad | None = None,
        num_own: int = 0,
    ) -> Prediction:
        """Predict a request's time to first token, and refuse it if that is too long.

        `load` is None for an unknown model. `share` is the rest of the tenant's share of the fleet, for which no other
        tenant waits; `num_own` counts the requests that the tenant has here already.

        Raises:
            ApiError: 404 for an unknown model; 503 with `no_worker`, `waking`, `queue_full` or `overloaded`; 400 when
                the request's own timeout is too short for its prompt even on an idle fleet.
        """
        if load is None:
            raise model_not_found(generation.model)
        if load.num_workers == 0 and load.coming is not None:
            return self._admit_coming(load, load.coming, generation, num_own)
        if load.num_workers == 0:
            message = f"No worker serves `{load.model}` at the moment."
            raise self._refusal("no_worker", message, self._jittered(UNKNOWN_RETRY_S))
        experience = self._experience.get(load.model)
        if experience is None:
            experience = self._experience[load.model] = Experience()
        expected = forecast(load, generation, experience, self._config)
        if generation.timeout_s is not None:
            _check_timeout(generation.timeout_s, expected)
        if share is not None and share.free_slots >= generation.num_at_once:
            of_share = forecast(share, generation, experience, self._config)
            # Within the tenant's share nothing is waited for: other tenants give way, so no promised place is taken.
            if not of_share.wait_s:
                return _prediction(load, generation, of_share)
        size, most = _size(generation), self._config.max_queued_requests
        own_excess = tenant_excess(load, size[0], num_own, expected.cost_s, most)
        if own_excess is not None and not expected.excess.is_exceeded:
            expected = replace(expected, excess=own_excess)
        self._check_turn(load, size, caller, expected)
        return _prediction(load, generation, expected)

    def _admit_coming(self, load: FleetLoad, coming: HostedModel, generation: Generation, num_own: int) -> Prediction:
        """Let a request wait for a model that a host loads.

        The host predicts the wait from the measured time of the model's last start. A request is refused if the model
        cannot be started, if its deadline is sooner, or if the queue or its tenant's part of it is full. Refused
        clients return a little after the predicted time, each at another moment.
        """
        later_s = coming.ready_in_s * (1 + JITTER * self._uniform())
        if coming.state == "failed":
            self._metrics.shed["no_worker"] += 1
            raise cannot_start(load.model)
        timeout_s = generation.timeout_s or self._config.default_timeout_s
        if coming.ready_in_s >= timeout_s:
            why = _WHY.get(coming.state, "it is being loaded")
            message = f"`{load.model}` will serve in about {coming.ready_in_s:.1f} s: {why}."
            raise self._refusal("waking", message, later_s)
        most = self._config.max_queued_requests
        if load.queued_requests + generation.num_at_once > most:
            message = f"{load.queued_requests} requests are waiting for `{load.model}` already, which is being loaded."
            raise self._refusal("queue_full", message, later_s)
        if (own := tenant_excess(load, generation.num_at_once, num_own, 0.0, most)) is not None:
            raise self._refusal("queue_full", own.message, later_s)
        self._experience.setdefault(load.model, Experience())
        tokens, num = generation.estimated_prompt_tokens, generation.num_sequences
        return Prediction(load.model, coming.ready_in_s, tokens, num, own_s=coming.ready_in_s)

    def outlook(self, load: FleetLoad) -> Outlook:
        """Predict the wait of a request that comes now."""
        return outlook(load, self._experience.get(load.model) or Experience())

    def observe(
        self, prediction: Prediction, actual_ttft_s: float, prompt_tokens: int = 0, completion_tokens: int = 0
    ) -> None:
        """Learn from a finished answer and its token counts; 0 prompt tokens where the worker has not said."""
        experience = self._experience[prediction.model]
        if prediction.ttft_s is not None:
            self._metrics.prediction_error_s.observe(actual_ttft_s - prediction.ttft_s)
            experience.learn_wait(prediction.wait_s, actual_ttft_s - prediction.own_s, self._clock())
        experience.learn(
            prompt_tokens / max(1, prediction.estimated_prompt_tokens) if prompt_tokens else None,
            completion_tokens / prediction.num_sequences if completion_tokens else None,
        )

    def _check_turn(self, load: FleetLoad, size: Size, caller: Caller, expected: Forecast) -> None:
        book = self._books.get(load.model)
        if book is None:
            book = self._books[load.model] = ReservationBook(self._uniform)
        book.calendar.num_gateways = load.num_gateways
        now = self._clock()
        found = None
        if book:
            for reservation in book.expire(now):
                self._count_unused(load.model, reservation)
            found = book.find(caller, size, now)
        if not self._may_begin(book, found, caller, expected, now):
            raise self._turn_away(load, book, found, caller, size, expected, now)
        if found is not None:
            if found.is_booked:
                self._metrics.promises["kept"] += 1
                self._metrics.retry_after_error_s.observe(0.0)
            book.use(found)
            self._withdraw(load.model, found)

    def _may_begin(
        self, book: ReservationBook, found: Reservation | None, caller: Caller, expected: Forecast, now: float
    ) -> bool:
        excess = expected.excess
        slo_s = self._config.interactive_ttft_slo_s
        if found is not None and found.is_booked and found.return_at <= now:
            return not excess.is_exceeded or 0 < excess.seconds <= _tolerance_s(found, excess, slo_s)
        if excess.is_exceeded:
            return False
        if expected.wait_s <= IDLE_SHARE * slo_s and book.calendar.is_free_soon(now, excess.seconds, expected.cost_s):
            return True
        return book.has_room(caller, found, excess.seconds, expected.cost_s, now)

    def _turn_away(
        self,
        load: FleetLoad,
        book: ReservationBook,
        found: Reservation | None,
        caller: Caller,
        size: Size,
        expected: Forecast,
        now: float,
    ) -> ApiError:
        excess = expected.excess
        if expected.cost_s == 0:
            return self._refusal(excess.reason, excess.message, self._jittered(UNKNOWN_RETRY_S))
        is_broken = found is not None and found.is_booked and found.return_at <= now
        message, num_others = excess.message, len(book) - (found is not None)
        if not excess.is_exceeded:
            message = f"The next places of `{load.model}` are kept for those refused earlier ({num_others})."
        advice = book.refuse(caller, found, size, excess.seconds, expected.cost_s, now)
        if is_broken:
            self._metrics.promises["broken"] += 1
            self._metrics.retry_after_error_s.observe(advice.wait_s)
        reservation = book.get(advice.ticket)
        if reservation is not None and self._places is not None and load.num_gateways > 1:
            self._withdraw(load.model, reservation)
            reservation.offer = self._places.offer(load.model, reservation)
        self._metrics.promises["made"] += advice.turn_in_s is None
        return self._refusal(excess.reason, message, advice.wait_s, advice)

    def _withdraw(self, model: str, reservation: Reservation) -> None:
        if reservation.offer is not None and self._places is not None:
            self._places.withdraw(model, reservation, reservation.offer)
            reservation.offer = None

    def _count_unused(self, model: str, reservation: Reservation) -> None:
        """Count a promise whose client did not come, unless another gateway has kept it."""

        def count() -> None:
            self._metrics.promises["unused"] += 1

        if reservation.offer is None or self._places is None:
            count()
        else:
            self._places.settle(model, reservation, reservation.offer, count)

    def _refusal(self, reason: str, message: str, retry_after_s: float, advice: RetryAdvice | None = None) -> ApiError:
        self._metrics.shed[reason] += 1
        retry_after_s = min(MAX_RETRY_S, max(1.0, retry_after_s))
        text = f"{message} Try again in {whole_seconds(retry_after_s)} s"
        if advice is not None and advice.turn_in_s is None:
            text += ": a place is kept for you then"
        elif advice is not None:
            text += f" to keep your place: it will be your turn in about {advice.turn_in_s:.0f} s"
        headers = {}
        if advice is not None and advice.ticket is not None:
            place = "booked" if advice.turn_in_s is None else "line"
            headers = {"x-headrace-ticket": advice.ticket, "x-headrace-place": place}
        return ApiError(503, f"{text}.", code=reason, retry_after_s=retry_after_s, headers=headers)

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 - JITTER + 2 * JITTER * self._uniform())


def _prediction(load: FleetLoad, generation: Generation, expected: Forecast) -> Prediction:
    is_known = load.prefill_rate > 0 or load.decode_rate > 0
    return Prediction(
        load.model,
        expected.first_wait_s + expected.own_s if is_known else None,
        generation.estimated_prompt_tokens,
        generation.num_sequences,
        expected.uncorrected_wait_s,
        expected.own_s,
    )


def _size(generation: Generation) -> Size:
    return generation.num_at_once, generation.estimated_prompt_tokens


def _tolerance_s(promise: Reservation, excess: Excess, slo_s: float) -> float:
    if not excess.is_elastic:
        return 0.0
    if excess.reason != "overloaded":
        return FULL_QUEUE_TOLERANCE * slo_s
    return PROMISE_TOLERANCE * slo_s + promise.promised_wait_s


def _check_timeout(timeout_s: float, expected: Forecast) -> None:
    if expected.own_s > timeout_s and expected.wait_s == 0:
        message = f"The prompt alone takes about {expected.own_s:.1f} s here; 'timeout' is {timeout_s:g} s."
        raise ApiError(400, message, param="timeout", code="timeout_too_short")
