"""A worker's death as this gateway saw it. The fleet writes it, and corrects it when more becomes known."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Death:
    """One worker's end.

    Attributes:
        why: For logs and dead letters.
        found_at: Loop time at which it was found.
        is_blamed: Something that this worker ran may be the cause: it ended alone, while others were heard. False when
            many ended together, and again when the worker is heard after all.
        time: Unix seconds at which it was found.
    """

    worker: str
    model: str
    why: str
    found_at: float
    is_blamed: bool
    time: float = field(default_factory=time.time)
