"""Places for the requests that a gateway answers at once: who gets one, and when the next is expected to be free."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from gateway.admission.hold_times import HoldTimes
from gateway.errors import ApiError, whole_seconds
from gateway.shares import Refusal, Shares

# A key may have so many times the free places: 7/8 of all if it is alone.
_PLACES_PER_FREE_PLACE = 7


class AnswerPlaces:
    """Owns the places of one gateway, and since when each is taken: that is how long they are expected to be."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Have `total` places, shared fairly among keys."""
        self._shares = Shares(total, _PLACES_PER_FREE_PLACE)
        self._clock = clock
        self._all = HoldTimes()
        self._keys: defaultdict[str, HoldTimes] = defaultdict(HoldTimes)

    @property
    def num_used(self) -> int:
        """Places that are taken."""
        return self._shares.used

    def take(self, key_id: str) -> object:
        """Give a key a place until `give_back`, and return what names it.

        Raises:
            ApiError: 503 when all are taken; 429 when the key has its share.
        """
        refusal = self._shares.take(key_id)
        if refusal is not None:
            raise self._refused(refusal, key_id)
        place, now = object(), self._clock()
        self._all.begin(place, now)
        self._keys[key_id].begin(place, now)
        return place

    def give_back(self, key_id: str, place: object) -> None:
        """Take a place back."""
        self._shares.give_back(key_id)
        holds, now = self._keys[key_id], self._clock()
        self._all.end(place, now)
        holds.end(place, now)
        if holds.is_empty:
            del self._keys[key_id]

    def _refused(self, refusal: Refusal, key_id: str) -> ApiError:
        if refusal is Refusal.ALL_TAKEN:
            wait_s = self._all.retry_after_s(self._clock())
            message = f"This gateway answers {self._shares.total} requests at once, and does. {_advice(wait_s)}"
            return ApiError(503, message, code="too_many_streams", retry_after_s=wait_s)
        wait_s = self._keys[key_id].retry_after_s(self._clock())
        num = self._shares.held(key_id)
        message = f"This gateway answers {num} requests of this key, and keeps what is free for others."
        return ApiError(429, f"{message} {_advice(wait_s)}", code="too_many_streams", retry_after_s=wait_s)


def _advice(wait_s: float) -> str:
    return f"Try again in {whole_seconds(wait_s)} s, when one of them is expected to have ended."
