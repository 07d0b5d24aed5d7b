"""Requests that were quarantined lately because they kill workers, so that a repetition does not cost as many again.

A first repetition is not refused unseen, since the cause may be mended or the verdict wrong: it begins as a suspect
with one death to its account, runs on a worker with no other suspect, and the next death convicts it. After that the
same tenant's same prompt with the same parameters is refused for a while. One that is answered is forgotten. Each
gateway remembers its own verdicts.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from gateway.dispatch.inflight import Flight, Loss
from gateway.errors import ApiError
from shared.messages import Request

MEMORY_S = 600.0
MAX_REMEMBERED = 1000
MAX_VERDICTS = 2

_encode = msgspec.msgpack.Encoder().encode


class KnownPoison:
    """Owns what is remembered: for each kind of request the deaths that convicted it."""

    def __init__(self, time: Callable[[], float]) -> None:
        """Remember nothing; `time` gives loop time."""
        self._time = time
        self._losses: OrderedDict[bytes, list[Loss]] = OrderedDict()

    def note(self, flight: Flight) -> None:
        """Remember a flight that has been found to kill workers."""
        key = kind_of(flight.request)
        self._losses[key] = [*self._losses.get(key, ()), flight.losses[-1]]
        self._losses.move_to_end(key)
        if len(self._losses) > MAX_REMEMBERED:
            self._losses.popitem(last=False)

    def forget(self, flight: Flight) -> None:
        """Forget what is known of requests like one that has been answered."""
        if self._losses:
            self._losses.pop(kind_of(flight.request), None)

    def find(self, request: Request) -> Loss | None:
        """Return the death that a new request has to its account because of others like it, if there is one.

        Raises:
            ApiError: 500; requests like it were quarantined several times.
        """
        if not self._losses:
            return None
        since = self._time() - MEMORY_S
        # A death is not blamed any more when its worker is heard again.
        losses = [loss for loss in self._losses.get(kind_of(request), ()) if loss.death.is_blamed]
        losses = [loss for loss in losses if loss.death.found_at >= since]
        if len(losses) < MAX_VERDICTS:
            return losses[-1] if losses else None
        message = f"Every worker that ran this request died of it. It is refused for {MEMORY_S / 60:.0f} minutes."
        raise ApiError(500, message, code="request_quarantined", headers={"x-should-retry": "false"})


def kind_of(request: Request) -> bytes:
    """Return what names requests of the same tenant, prompt and parameters; seeds are often made by the gateway."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    prompt = (request.text, request.messages, request.chat, request.token_ids)
    return hashlib.sha256(_encode((request.tenant, request.model, prompt, sampling))).digest()
