"""What a fleet's coming seconds are promised to: work that was booked, second by second, against the work that drains.

All amounts are seconds of the whole fleet: a request costs the time in which the fleet does as much work as it brings.
The excess is by how much the present queue is longer than it may be for a request to be admitted; negative when there
is room. Work drains at one second a second. Only the share `FILL` of it is promised: predictions are not exact, and
the rest goes to new requests.

Owns the bookings; `gateway/admission/reservations.py` says whose they are.
"""

from __future__ import annotations

import math
from typing import TypeVar

HORIZON_S = 60
# Tenants that hold more than half of the bookings may fill less, so that others find room in every second.
FILL = 0.95
FILL_OF_DOMINANT = 0.85
# While less than this is booked in all, no tenant counts as dominant.
_SMALL_TOTAL_S = 2.0

_Key = TypeVar("_Key", int, str)


class DrainCalendar:
    """The bookings of one model's fleet, by second and by tenant.

    Attributes:
        num_gateways: How many gateways book the same fleet without seeing each other's calendars; each assumes that the
            others have promised as much as itself.
    """

    def __init__(self) -> None:
        self._booked: dict[int, float] = {}
        self._by_tenant: dict[str, float] = {}
        self._total = 0.0
        self.num_gateways = 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing is booked."""
        return not self._booked

    def book(self, at: float, cost_s: float, tenant: str) -> None:
        """Promise `cost_s` at a time to a tenant."""
        second = math.floor(at)
        self._booked[second] = self._booked.get(second, 0.0) + cost_s
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0.0) + cost_s
        self._total += cost_s

    def free(self, at: float, cost_s: float, tenant: str) -> None:
        """Undo a `book` with the same arguments."""
        second = math.floor(at)
        _subtract(self._booked, second, cost_s)
        _subtract(self._by_tenant, tenant, cost_s)
        self._total = max(0.0, self._total - cost_s)

    def has_room_now(self, now: float, excess_s: float, cost_s: float, tenant: str, earlier_s: float) -> bool:
        """Whether a request can begin now and every promise can still be kept.

        `excess_s` is by how much the queue is too long for it; `earlier_s` is work that was refused before it and not
        booked.
        """
        if excess_s > 0:
            return False
        if self.is_empty and earlier_s == 0:
            return True
        slack = self._slack(now, excess_s, tenant)
        return min(slack) >= cost_s * self.num_gateways and slack[-1] >= cost_s * self.num_gateways + earlier_s

    def is_free_soon(self, now: float, excess_s: float, cost_s: float) -> bool:
        """Whether a request can begin now without delaying the bookings due within about a second."""
        second = math.floor(now)
        due_s = sum(cost for at, cost in self._booked.items() if at <= second + 1)
        return excess_s + (due_s + cost_s) * self.num_gateways <= 0

    def first_room(self, now: float, excess_s: float, cost_s: float, tenant: str, earlier_s: float) -> int | None:
        """Return in how many seconds there is room for a request, behind work that waits; None beyond the horizon."""
        needed_s = cost_s * self.num_gateways + earlier_s
        first: int | None = None
        slack = self._slack(now, excess_s, tenant)
        for wait_s in range(HORIZON_S, 0, -1):
            if slack[wait_s] < needed_s:
                break
            first = wait_s
        return first

    def late_turn_s(self, now: float, excess_s: float, cost_s: float, tenant: str, earlier_s: float) -> float:
        """Return after how long a request can begin for which there is no room within the horizon."""
        missing_s = cost_s * self.num_gateways + earlier_s - self._slack(now, excess_s, tenant)[-1]
        return HORIZON_S + missing_s / FILL

    def _slack(self, now: float, excess_s: float, tenant: str) -> list[float]:
        """Return by how much the queue will be shorter than it may be, now and at each second of the horizon."""
        is_dominant = self._total > _SMALL_TOTAL_S and self._by_tenant.get(tenant, 0.0) > self._total / 2
        fill = FILL_OF_DOMINANT if is_dominant else FILL
        second, booked, scale = math.floor(now), self._booked, self.num_gateways
        promised_s = sum(cost for at, cost in booked.items() if at <= second) * scale
        slack = [-excess_s - promised_s]
        for wait_s in range(1, HORIZON_S + 1):
            promised_s += booked.get(second + wait_s, 0.0) * scale
            slack.append(fill * wait_s - excess_s - promised_s)
        return slack


def _subtract(amounts: dict[_Key, float], key: _Key, amount: float) -> None:
    left = amounts[key] - amount
    # Sums of many small numbers do not come back to zero exactly.
    if left > 1e-9:
        amounts[key] = left
    else:
        del amounts[key]
