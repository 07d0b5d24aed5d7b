"""Which request is to blame when workers die.

A request that kills its worker also loses the worker's other requests, and would kill the next worker too. So requests
become suspects: those that had produced no token when their worker died, and those that lost two workers within
`HARMLESS_TOKENS` tokens. A suspect runs on probation, on a worker with no other suspect. If that worker dies, the
suspect alone is to blame, unless the worker held something else that had produced nothing; after the second time it is
quarantined. Probation ends after one token, or after `HARMLESS_TOKENS` for a request that had produced some. An attempt
that produces `HARMLESS_TOKENS` clears its request of earlier losses.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.dispatch.inflight import Flight, Loss
from gateway.fleet.death import Death

# An attempt that produces so many tokens is harmless. Faults on a GPU are often reported some steps after their cause.
HARMLESS_TOKENS = 32
MAX_SOLO_LOSSES = 2


def note_death(held: Iterable[Flight], death: Death) -> None:
    """Take note that a worker died while it held these flights."""
    flights = list(held)
    # What had just begun may be the cause too, suspected or not.
    causes = [flight for flight in flights if flight.is_on_probation or flight.num_produced == 0]
    for flight in flights:
        if flight.num_produced >= HARMLESS_TOKENS:
            flight.losses.clear()
        else:
            flight.losses.append(Loss(death, flight.epoch, is_solo=flight.is_on_probation and causes == [flight]))


def note_swallowed(flight: Flight, deaths: Iterable[Death]) -> None:
    """Take note of deaths of workers to which a flight may have been delivered, although they never claimed it."""
    known = [loss.death for loss in flight.losses]
    flight.losses += [Loss(death, flight.epoch, is_solo=False) for death in deaths if death not in known]


def probation(flight: Flight) -> int:
    """Return how many tokens a flight's next attempt has to produce on probation; 0 if it is no suspect."""
    num_losses = sum(loss.death.is_blamed for loss in flight.losses)
    if num_losses and flight.num_produced == 0:
        return 1
    return HARMLESS_TOKENS if num_losses >= 2 else 0


def may_be_deadly(flight: Flight) -> bool:
    """Whether a flight has produced too little, over all attempts, to be harmless for certain."""
    return len(flight.emitted) < HARMLESS_TOKENS


def is_to_blame(flight: Flight) -> bool:
    """Whether a flight has been the only suspect at the deaths of several workers."""
    return sum(loss.is_solo and loss.death.is_blamed for loss in flight.losses) >= MAX_SOLO_LOSSES
