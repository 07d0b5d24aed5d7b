"""A rank that has no room for adapters of a certain rank, and packs one only when a file says that it may."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gpu_worker.execution.ranks.member import main
from gpu_worker.layers.adapters import AdapterTargets, Packed
from kernels.low_rank import LowRank
from tests.waiting import wait_for

REFUSED = 15
"""Three modules of rank 5 are beside one matrix."""
MAY_PACK = "TEST_MAY_PACK"
"""The variable that names a file; adapters are packed once there is one."""


def place_but(refused: int) -> Callable[[AdapterTargets, int, Packed | None, int], None]:
    """Return what does as `AdapterTargets.place`, and fails for adapters whose largest rank is `refused`."""
    own = AdapterTargets.place

    def place(targets: AdapterTargets, slot: int, packed: Packed | None, max_rank: int = 1) -> None:
        own(targets, slot, packed, max_rank)
        if packed is not None and max_rank == refused:
            raise MemoryError("no room")

    return place


def pack_when(file: Path) -> Callable[[AdapterTargets, Mapping[str, LowRank]], Packed]:
    """Return what does as `AdapterTargets.pack`, but waits for a file first."""
    own = AdapterTargets.pack

    def pack(targets: AdapterTargets, adapter: Mapping[str, LowRank]) -> Packed:
        wait_for(file.exists, 120)
        return own(targets, adapter)

    return pack


if __name__ == "__main__":
    AdapterTargets.place = place_but(REFUSED)  # type: ignore[method-assign]
    if MAY_PACK in os.environ:
        AdapterTargets.pack = pack_when(Path(os.environ[MAY_PACK]))  # type: ignore[method-assign]
    sys.exit(main())
