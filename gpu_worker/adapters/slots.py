"""Which adapter is in which slot of `AdapterTargets`: a cache that is bounded in count and bytes. It needs no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Resident:
    slot: int
    num_bytes: int


class AdapterSlots:
    """Adapters by the digest of their content, the least recently used first. Written on the event loop's thread only.

    Attributes:
        emptied: Slots of evicted adapters whose memory is not cleared yet; no sequence uses them.
    """

    def __init__(self, num_slots: int = 0, max_bytes: int = 0) -> None:
        self.num_slots = num_slots
        self.max_bytes = max_bytes
        self.emptied: set[int] = set()
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        # Slots that were taken for adapters that are being placed, with their bytes.
        self._taken: dict[int, int] = {}

    @property
    def residents(self) -> tuple[str, ...]:
        """Digests, the least recently used first."""
        return tuple(self._residents)

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is resident or being placed."""
        return sum(each.num_bytes for each in self._residents.values()) + sum(self._taken.values())

    def slot(self, digest: str) -> int | None:
        """Return where an adapter is; None if it is not resident."""
        found = self._residents.get(digest)
        return None if found is None else found.slot

    def use(self, digest: str) -> None:
        """Note that a resident adapter is used."""
        self._residents.move_to_end(digest)

    def take(self, num_bytes: int, used: Collection[str]) -> int | None:
        """Return a slot for an adapter of this size in bytes; None if adapters in use leave no room.

        Adapters that are not in use are taken out, the least recently used first, and no more than it needs.
        """
        idle = [digest for digest in self._residents if digest not in used]
        kept = [each for digest, each in self._residents.items() if digest in used]
        held_bytes = sum(each.num_bytes for each in kept) + sum(self._taken.values())
        if len(kept) + len(self._taken) >= self.num_slots or held_bytes + num_bytes > self.max_bytes:
            return None
        while len(self._residents) + len(self._taken) >= self.num_slots or self.num_bytes + num_bytes > self.max_bytes:
            self.emptied.add(self._residents.pop(idle.pop(0)).slot)
        occupied = {each.slot for each in self._residents.values()} | self._taken.keys()
        slot = min(set(range(self.num_slots)) - occupied)
        self._taken[slot] = num_bytes
        return slot

    def release(self, slot: int) -> None:
        """Note that nothing was placed in a slot that was taken."""
        del self._taken[slot]

    def add(self, digest: str, slot: int) -> None:
        """Note that an adapter was placed in a slot that was taken for it."""
        self._residents[digest] = _Resident(slot, self._taken.pop(slot))
