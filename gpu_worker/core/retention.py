"""Which contents of a cache are evicted last, until when, and how tenants share that.

A tenant's quota is its share of the capacity, by the weights of the tenants that retain something or ask to. It may
hold more while no tenant asks for the rest, and gives that back to tenants below their own quota. Content that does not
fit is not retained, and stays cached like any other. Within a tenant the latest deadlines are kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, inf

_SWEEP_MINIMUM = 64


@dataclass(slots=True, eq=False)
class _Grant:
    """Digests of one prefix, in order, that are retained until one time."""

    tenant: _Tenant
    until: float
    cost: float
    digests: dict[bytes, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Tenant:
    """One tenant, with a heap of its grants by deadline; empty grants stay in it until swept out."""

    name: str
    weight: float = 1.0
    used: float = 0.0
    heap: list[tuple[float, int, _Grant]] = field(default_factory=list)


class _Room:
    """Room that is made for one tenant.

    Attributes:
        let_go: Digests that are no longer retained, in order.
    """

    def __init__(self, owner: _Tenant, competing: list[_Tenant], capacity: float) -> None:
        self.let_go: list[bytes] = []
        self._competing = competing
        self._per_weight = capacity / sum(each.weight for each in competing)
        self._victim = owner

    def quota(self, tenant: _Tenant) -> float:
        """Return the units that a tenant may retain while all others want theirs, too."""
        return self._per_weight * tenant.weight

    def victim(self) -> _Tenant:
        """Return a tenant above its quota; there is one while another tenant, below its own, finds no room."""
        if self._victim.used <= self.quota(self._victim):
            self._victim = max(self._competing, key=lambda each: each.used / each.weight)
        return self._victim


class Retention:
    """Not thread safe. Times are seconds of any one clock.

    Attributes:
        used: Units that are retained.
    """

    def __init__(self, capacity: float) -> None:
        """Retain nothing yet, and `capacity` units at most."""
        self._capacity = capacity
        self._grants: dict[bytes, _Grant] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._num_grants = 0
        self.used = 0.0
        self.next_expiry = inf

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._grants

    def __len__(self) -> int:
        return len(self._grants)

    def retain(
        self, tenant: str, weight: float, digests: Iterable[bytes], until: float, cost: float = 1.0
    ) -> list[bytes]:
        """Retain contents of a tenant until a time, as far as its quota goes.

        Args:
            tenant: Whose they are.
            weight: The tenant's, from now on.
            digests: In prefix order; the first ones are retained first.
            until: A later deadline replaces an earlier one, never the other way round. Rounded up to a whole second,
                so that choices of one request, which end one after the other, do not each move all digests.
            cost: Units of each content.

        Returns:
            Contents that are no longer retained, the ends of prefixes first.
        """
        until = float(ceil(until))
        owner = self._tenants.setdefault(tenant, _Tenant(tenant))
        owner.weight = weight
        grant, room = _Grant(owner, until, cost), _Room(owner, self._competing(owner), self._capacity)
        for digest in digests:
            known = self._grants.get(digest)
            if known is not None and known.until >= until:
                continue
            if known is None and not self._make_room(room, grant):
                break
            if known is not None:
                self._remove(known, digest)
            grant.digests[digest] = None
            self._grants[digest] = grant
            owner.used += cost
            self.used += cost
        if grant.digests:
            self._num_grants += 1
            heapq.heappush(owner.heap, (until, self._num_grants, grant))
            self.next_expiry = min(self.next_expiry, until)
            self._sweep(owner)
        elif not owner.used:
            del self._tenants[tenant]
        return room.let_go

    def discard(self, digest: bytes) -> None:
        """Retain a content no longer."""
        grant = self._grants.get(digest)
        if grant is not None:
            self._remove(grant, digest)

    def expire(self, now: float, limit: float = inf) -> list[bytes]:
        """Return contents whose time is over, the ends of prefixes first; they are no longer retained."""
        expired: list[bytes] = []
        if now < self.next_expiry:
            return expired
        for tenant in list(self._tenants.values()):
            while tenant.heap and (tenant.heap[0][0] <= now or not tenant.heap[0][2].digests):
                grant = tenant.heap[0][2]
                while grant.digests:
                    if len(expired) >= limit:
                        return expired
                    expired.append(self._pop(grant))
                heapq.heappop(tenant.heap)
            if not tenant.heap:
                del self._tenants[tenant.name]
        self.next_expiry = min((tenant.heap[0][0] for tenant in self._tenants.values()), default=inf)
        return expired

    def _make_room(self, room: _Room, grant: _Grant) -> bool:
        """Let contents go until one more of the grant fits; return False where none may go for it."""
        while self.used + grant.cost > self._capacity:
            if grant.tenant.used + grant.cost <= room.quota(grant.tenant):
                earliest = _earliest(room.victim())
            else:
                earliest = _earliest(grant.tenant)
                if earliest is not None and earliest.until >= grant.until:
                    earliest = None
            if earliest is None:
                return False
            room.let_go.append(self._pop(earliest))
        return True

    def _competing(self, owner: _Tenant) -> list[_Tenant]:
        return [each for each in self._tenants.values() if each.used or each is owner]

    def _pop(self, grant: _Grant) -> bytes:
        digest = next(reversed(grant.digests))
        self._remove(grant, digest)
        return digest

    def _remove(self, grant: _Grant, digest: bytes) -> None:
        del grant.digests[digest], self._grants[digest]
        grant.tenant.used -= grant.cost
        self.used -= grant.cost

    def _sweep(self, tenant: _Tenant) -> None:
        """Drop empty grants where they are most of the heap."""
        if len(tenant.heap) > _SWEEP_MINIMUM and len(tenant.heap) & (len(tenant.heap) - 1) == 0:
            tenant.heap = [entry for entry in tenant.heap if entry[2].digests]
            heapq.heapify(tenant.heap)


def _earliest(tenant: _Tenant) -> _Grant | None:
    while tenant.heap and not tenant.heap[0][2].digests:
        heapq.heappop(tenant.heap)
    return tenant.heap[0][2] if tenant.heap else None
