"""What a worker's offers and claims depend on: its engine, its room, the time, and the way to other workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gpu_worker.consumer.prefixes.messages import PeerMessage
from gpu_worker.engine.engine import EngineStats


class EngineState(Protocol):
    """The engine, as far as it can be looked at from the event loop."""

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot."""

    @property
    def num_blank_blocks(self) -> int:
        """Blocks that hold nothing."""

    def is_cached(self, digest: bytes) -> bool:
        """Return whether the prefix cache has a block of this digest."""


class Timer(Protocol):
    """Something that will be called."""

    def cancel(self) -> None:
        """Do not call it."""


class Peers(Protocol):
    """The other workers of the model, and the time."""

    @property
    def worker(self) -> str:
        """This worker's own name among them."""

    def send(self, worker: str, message: PeerMessage) -> bool:
        """Send a message, which may get lost; return whether it can be sent at all."""

    def time(self) -> float:
        """Return monotonic seconds."""

    def age_s(self, stored_at: float) -> float:
        """Return for how long a request has been in the queue, which says when it has stored it."""

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Call something after `delay` seconds."""
