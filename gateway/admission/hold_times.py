"""How long the holders of limited places keep them, when places are free again, and the places of answers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from gateway.errors import ApiError, whole_seconds
from gateway.shares import Refusal, Shares

# Weight of the latest holder in the mean.
_SMOOTHING = 0.2
MAX_WAIT_S = 60.0
# A key may hold up to this multiple of the free places: 7/8 of all places if it is alone.
_PLACES_PER_FREE_PLACE = 7


class HoldTimes:
    """When each holder got its places, and the running mean of how long places are held."""

    __slots__ = ("_holders", "_mean_s", "num_held")

    def __init__(self) -> None:
        self.num_held = 0
        self._mean_s: float | None = None
        # Start and places by holder, oldest first.
        self._holders: dict[object, tuple[float, int]] = {}

    def begin(self, holder: object, now: float, num_places: int = 1) -> None:
        """Note that a holder has places from now on."""
        self._holders[holder] = (now, num_places)
        self.num_held += num_places

    def end(self, holder: object, now: float) -> int:
        """Note that a holder has given its places back; return how many they were."""
        started, num_places = self._holders.pop(holder)
        self.num_held -= num_places
        held_s = max(0.0, now - started)
        self._mean_s = held_s if self._mean_s is None else self._mean_s + _SMOOTHING * (held_s - self._mean_s)
        return num_places

    @property
    def is_empty(self) -> bool:
        """Whether there is no holder; one may hold no place."""
        return not self._holders

    def mean_s(self, now: float) -> float:
        """Return how long places are usually held; until one is given back, twice as long as the oldest was held."""
        if self._mean_s is not None:
            return self._mean_s
        return 2 * max((now - started for started, _ in self._holders.values()), default=0.0)

    def wait_s(self, now: float, missing: int, running: int, hold_s: float) -> float:
        """Predict when `missing` more places will have been given back.

        The longer of two estimates counts. The first is the rate at which `running` places come back that are held for
        `hold_s` each (Little's law). The second is the age of the places held here: after a burst, none comes back
        before it was held for `hold_s`.
        """
        by_rate_s = missing * hold_s / max(1, running)
        by_age_s = 0.0
        for started, num_places in self._holders.values():
            missing -= num_places
            by_age_s = started + hold_s - now
            if missing <= 0:
                break
        return min(MAX_WAIT_S, max(by_rate_s, by_age_s, 0.0))

    def retry_after_s(self, now: float) -> float:
        """Predict when the next place held here will have been given back: 1 s or more, as `Retry-After` says it."""
        return max(1.0, self.wait_s(now, 1, self.num_held, self.mean_s(now)))


class AnswerPlaces:
    """The places for the requests that a gateway answers at once: who gets one, and when the next is free."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._shares = Shares(total, _PLACES_PER_FREE_PLACE)
        self._clock = clock
        self._all = HoldTimes()
        self._keys: defaultdict[str, HoldTimes] = defaultdict(HoldTimes)

    def take(self, key_id: str) -> object:
        """Give a key a place, and return its token; `ApiError` 503 if all are taken, 429 beyond the key's share."""
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
            status, holds = 503, self._all
            message = f"This gateway answers {self._shares.total} requests at once, and does."
        else:
            status, holds, num = 429, self._keys[key_id], self._shares.held(key_id)
            message = f"This gateway answers {num} requests of this key, and keeps the free places for others."
        wait_s = holds.retry_after_s(self._clock())
        advice = f"Try again in {whole_seconds(wait_s)} s, when one of them is expected to have ended."
        return ApiError(status, f"{message} {advice}", code="too_many_streams", retry_after_s=wait_s)
