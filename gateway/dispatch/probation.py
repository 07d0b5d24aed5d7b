"""Suspects that wait for their turn: at most as many of a model run at once as it has workers, and one of each kind.

A worker refuses a second suspect; this keeps suspects from being published only to be refused. Copies of one poisonous
request would kill a worker each if they ran at once, where the first ones are enough to convict all. Owns who waits and
who runs; recovery publishes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gateway.dispatch.inflight import Flight, FlightTable
from gateway.dispatch.known_poison import kind_of


class ProbationQueue:
    """Suspects of all models: tenants take turns, so that one with much poison does not keep the others waiting."""

    def __init__(self, flights: FlightTable, num_workers: Callable[[str], int]) -> None:
        """Pace flights of the table; `num_workers` gives the live workers of a model."""
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
            # Its next death is the verdict, which also ends its copies: they need not die one after the other.
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)

    def take_ready(self) -> list[Flight]:
        """Return the flights whose turn has come, to be published now."""
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
