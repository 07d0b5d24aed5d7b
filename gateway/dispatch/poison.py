"""Requests that kill workers: which one is to blame, when suspects run, which are refused, and their dead letters.

Suspects are requests that had produced no token when their worker died, and those that lost two workers within
`HARMLESS_TOKENS` tokens. A suspect runs on probation, on a worker with no other suspect. If that worker dies, the
suspect alone is to blame, unless the worker held something else that had produced nothing; after the second time it is
quarantined. Probation ends after one token, or after `HARMLESS_TOKENS` for a request that had produced some, which
clear a request of earlier losses. Where workers also die without the suspect (somebody restarts them, or memory is
short), two deaths may be chance: it is to blame for more than happened without it meanwhile, or for five.

Each gateway remembers its verdicts for a while. The first repetition of a quarantined request begins as a suspect with
one death to its account, because the cause may be mended or the verdict wrong. After the next death, the same tenant's
same prompt with the same parameters is refused. A request that is answered is forgotten.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

import msgspec
from nats.aio.client import Client

from gateway.dispatch.flight_log import Loss
from gateway.dispatch.inflight import Flight, FlightTable
from gateway.errors import ApiError
from gateway.fleet.deaths import Death
from shared.background_tasks import BackgroundTasks
from shared.dead_letters import DeadAttempt, DeadLetter, DeadReason, publish_dead_letter
from shared.errors import DependencyError
from shared.messages import Request

# An attempt with this many tokens is harmless. Faults on a GPU are often reported some steps after their cause.
HARMLESS_TOKENS = 32
MAX_SOLO_LOSSES = 2
# Of a suspect, beyond that, while workers die without it: another gateway's poison looks like that here.
MAX_MORE_LOSSES = 3
# Beyond that many causes a death is evidence for nothing; each is hashed.
_MAX_CAUSES = 8
_UNEXPLAINED_S = 60.0


def note_death(flights: list[Flight], death: Death) -> list[Flight]:
    """Take note that a worker died while it held these flights; return those that may be the cause."""
    # What had just begun may be the cause too, suspected or not.
    causes = [flight for flight in flights if flight.is_on_probation or flight.num_produced == 0]
    for flight in flights:
        if flight.num_produced >= HARMLESS_TOKENS:
            flight.losses.clear()
        else:
            flight.losses.append(Loss(death, flight.epoch, is_solo=flight.is_on_probation and causes == [flight]))
    return causes


def note_swallowed(flight: Flight, deaths: Iterable[Death]) -> None:
    """Take note of deaths of workers to which a flight may have been delivered, although they never claimed it."""
    known = [loss.death for loss in flight.losses]
    flight.losses += [Loss(death, flight.epoch, is_solo=False) for death in deaths if death not in known]


def probation(flight: Flight) -> int:
    """Return how many tokens a flight's next attempt has to produce on probation; 0 if it is not a suspect."""
    num_losses = sum(loss.death.is_blamed for loss in flight.losses)
    if num_losses and flight.num_produced == 0:
        return 1
    return HARMLESS_TOKENS if num_losses >= 2 else 0


def is_cleared(flight: Flight) -> bool:
    """Whether every worker whose death made a suspect of a flight has been heard again."""
    return not any(loss.death.is_blamed for loss in flight.losses)


def may_be_deadly(flight: Flight) -> bool:
    """Whether a flight has produced too little, over all attempts, to be harmless for certain."""
    return len(flight.emitted) < HARMLESS_TOKENS


def solo_losses(flight: Flight) -> list[Loss]:
    """Return the losses of a flight for which nothing else is to blame."""
    return [loss for loss in flight.losses if loss.is_solo and loss.death.is_blamed]


def is_to_blame(flight: Flight, others: UnexplainedDeaths | None = None) -> bool:
    """Whether a flight has been the only suspect at several deaths, and at more than happened without it meanwhile."""
    num_solo = len(solo_losses(flight))
    if num_solo < MAX_SOLO_LOSSES:
        return False
    num_others = 0 if others is None else others.num_without(flight)
    return num_solo >= min(max(MAX_SOLO_LOSSES, num_others + 1), MAX_SOLO_LOSSES + MAX_MORE_LOSSES)


class UnexplainedDeaths:
    """Remembers the last deaths of workers that held no single suspect, with the kinds of what may have caused each."""

    def __init__(self) -> None:
        self._deaths: deque[tuple[Death, frozenset[bytes]]] = deque(maxlen=100)

    def note(self, death: Death, causes: list[Flight]) -> None:
        """Remember a death. A flight that explains one alone explains the earlier ones that it may have caused, too."""
        solo = next((flight for flight in causes if flight.losses[-1].is_solo), None)
        if solo is not None:
            kind = kind_of(solo.request)
            explained = [one for one in self._deaths if kind in one[1]]
            for one in explained:
                self._deaths.remove(one)
        elif len(causes) <= _MAX_CAUSES:
            self._deaths.append((death, frozenset(kind_of(flight.request) for flight in causes)))

    def num_without(self, flight: Flight) -> int:
        """Return how many neither a suspect nor a copy explains, since its first solo loss or for the last minute."""
        solo, model, kind = solo_losses(flight), flight.request.model, kind_of(flight.request)
        since = max(solo[0].death.found_at, solo[-1].death.found_at - _UNEXPLAINED_S)
        return sum(
            death.is_blamed and death.model == model and death.found_at >= since and kind not in kinds
            for death, kinds in self._deaths
        )


MEMORY_S = 600.0
MAX_REMEMBERED = 1000
MAX_VERDICTS = 2

_encode = msgspec.msgpack.Encoder().encode


class KnownPoison:
    """Owns the verdicts: for each kind of request the deaths that convicted it."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._losses: OrderedDict[bytes, list[Loss]] = OrderedDict()

    def note(self, flight: Flight) -> None:
        """Remember a flight that has been found to kill workers."""
        key = kind_of(flight.request)
        self._losses[key] = [*self._losses.get(key, ()), (solo_losses(flight) or flight.losses)[-1]]
        self._losses.move_to_end(key)
        if len(self._losses) > MAX_REMEMBERED:
            self._losses.popitem(last=False)

    def forget(self, flight: Flight) -> None:
        """Forget deaths of requests like one that has been answered."""
        if self._losses:
            self._losses.pop(kind_of(flight.request), None)

    def find(self, request: Request) -> Loss | None:
        """Return an earlier death of a request like this; `ApiError` 500 if such were quarantined several times."""
        if not self._losses:
            return None
        since = self._time() - MEMORY_S
        # A death is not blamed any more when its worker is heard again.
        known = self._losses.get(kind_of(request), ())
        losses = [loss for loss in known if loss.death.is_blamed and loss.death.found_at >= since]
        if len(losses) < MAX_VERDICTS:
            return losses[-1] if losses else None
        message = f"Every worker that ran this request died of it. It is refused for {MEMORY_S / 60:.0f} minutes."
        raise ApiError(500, message, code="request_quarantined", headers={"x-should-retry": "false"})


def kind_of(request: Request) -> bytes:
    """Return a digest of tenant, prompt and parameters, without the seed: the gateway often makes it."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    prompt = (request.text, request.suffix, request.messages, request.media, request.chat, request.token_ids)
    cut = (request.add_special_tokens, request.truncate_prompt_tokens)
    computed = (request.adapter, request.pooling, request.prediction, request.kv_budget, sampling)
    return hashlib.sha256(_encode((request.tenant, request.model, prompt, cut, computed))).digest()


class ProbationQueue:
    """Owns the suspects that wait and those that run; recovery publishes them.

    At most as many of a model run at once as it has workers, which refuse a second suspect, and one of each kind:
    copies of one poisonous request would kill a worker each, where the first ones are enough to convict all. Tenants
    take turns, so that a tenant with many suspects does not keep the others waiting.
    """

    def __init__(self, flights: FlightTable, num_workers: Callable[[str], int]) -> None:
        self._by_id = flights.by_id
        self._num_workers = num_workers
        self._waiting: deque[tuple[Flight, bytes]] = deque()
        self._running: dict[Flight, tuple[int, bytes]] = {}
        # Of tenants with suspects: the number of the last turn of each.
        self._turns: dict[str, int] = {}
        self._num_turns = 0

    def add(self, flight: Flight) -> None:
        """Let a flight wait for its turn."""
        flight.is_parked = True
        entry = (flight, kind_of(flight.request))
        if any(loss.is_solo and loss.death.is_blamed for loss in flight.losses):
            # Its next death may be the verdict, which also ends its copies: they need not die one after the other.
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)

    def take_ready(self) -> list[Flight]:
        """Return the flights whose turn has come, and those that are no suspects any more, to be published now."""
        self._running = {
            flight: (epoch, kind) for flight, (epoch, kind) in self._running.items() if self._is_running(flight, epoch)
        }
        running_kinds = {kind for _, kind in self._running.values()}
        self._sort_by_turns()
        room: dict[str, int] = {}
        ready: list[Flight] = []
        for _ in range(len(self._waiting)):
            flight, kind = self._waiting.popleft()
            if self._by_id.get(flight.id) is not flight:
                continue
            if is_cleared(flight):
                flight.is_parked, flight.probation = False, 0
                ready.append(flight)
                continue
            model = flight.request.model
            if model not in room:
                num_running = sum(other.request.model == model for other in self._running)
                room[model] = max(1, self._num_workers(model)) - num_running
            if room[model] <= 0 or kind in running_kinds:
                self._waiting.append((flight, kind))
                continue
            room[model] -= 1
            running_kinds.add(kind)
            flight.is_parked = False
            self._running[flight] = (flight.epoch, kind)
            self._num_turns += 1
            self._turns[flight.request.tenant] = self._num_turns
            ready.append(flight)
        return ready

    def _sort_by_turns(self) -> None:
        """Put the tenants first whose last turn is longest ago; a tenant's own suspects keep their order."""
        tenants = {flight.request.tenant for flight in (*self._running, *(flight for flight, _ in self._waiting))}
        self._turns = {tenant: turn for tenant, turn in self._turns.items() if tenant in tenants}
        if len(tenants) > 1:
            self._waiting = deque(sorted(self._waiting, key=lambda entry: self._turns.get(entry[0].request.tenant, 0)))

    def _is_running(self, flight: Flight, epoch: int) -> bool:
        return self._by_id.get(flight.id) is flight and flight.epoch == epoch and flight.is_on_probation


_logger = logging.getLogger(__name__)


class Quarantine:
    """Writes dead letters of requests that harm workers or that no worker keeps; no answer waits for them."""

    def __init__(self, nats: Client, gateway: str, counts: Counter[str]) -> None:
        """Write in the name of `gateway`; `counts` are by the reasons for quarantine."""
        self._nats = nats
        self._gateway = gateway
        self._tasks = BackgroundTasks()
        self._counts = counts

    def take(self, flight: Flight, reason: DeadReason, why: str) -> ApiError:
        """Record a request in quarantine, and return the error for its client."""
        message = f"{why} The request is in quarantine under the id {flight.id}."
        attempts = tuple(
            DeadAttempt(loss.death.worker, loss.epoch, loss.death.time, loss.death.why) for loss in flight.losses
        )
        letter = DeadLetter(
            request=flight.attempt(),
            reason=reason,
            error=message,
            attempts=attempts,
            quarantined_by=self._gateway,
            quarantined=time.time(),
        )
        _logger.error("request %s of tenant %s is quarantined: %s", flight.id, flight.request.tenant, why)
        self._counts[reason] += 1
        self._tasks.spawn(self._write(letter))
        return ApiError(500, message, code="request_quarantined", headers={"x-should-retry": "false"})

    async def close(self) -> None:
        """Wait for the letters on their way."""
        await self._tasks.wait()

    async def _write(self, letter: DeadLetter) -> None:
        try:
            await publish_dead_letter(self._nats, letter)
        except DependencyError as error:
            _logger.error("request %s has no dead letter: %s", letter.request.id, error)
