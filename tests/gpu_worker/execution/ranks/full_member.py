"""A rank that has no room for adapters of a certain rank."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gpu_worker.execution.ranks.member import main
from gpu_worker.layers.adapters import AdapterTargets, Packed

REFUSED = 15
"""Three modules of rank 5 are beside one matrix."""


def place_but(refused: int) -> Callable[[AdapterTargets, int, Packed | None, int], None]:
    """Return what does as `AdapterTargets.place`, and fails for adapters whose largest rank is `refused`."""
    own = AdapterTargets.place

    def place(targets: AdapterTargets, slot: int, packed: Packed | None, max_rank: int = 1) -> None:
        own(targets, slot, packed, max_rank)
        if packed is not None and max_rank == refused:
            raise MemoryError("no room")

    return place


if __name__ == "__main__":
    AdapterTargets.place = place_but(REFUSED)  # type: ignore[method-assign]
    sys.exit(main())
