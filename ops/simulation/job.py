"""A request in a virtual fleet, and what became of it."""

from __future__ import annotations

from collections.abc import Callable

from shared.messages import Request


class Job:
    """One request, from the queue to its end. The worker that has it writes most of this.

    Attributes:
        number: In the queue.
        sent_at: When it was put there.
        first_s: Time to first token.
        last_at: When its last token came, of one that was preempted or lost since.
        emitted: Tokens that came before its worker died.
        num_moves: How often it has lost its worker.
        num_prompt: Tokens of its prompt, and of these `num_cached` that the prefix cache had.
        workers: Those that began it.
    """

    __slots__ = (
        "_finished",
        "emitted",
        "first_s",
        "is_done",
        "last_at",
        "num_cached",
        "num_moves",
        "num_prompt",
        "number",
        "request",
        "sent_at",
        "workers",
    )

    def __init__(self, request: Request, finished: Callable[[list[int]], None] | None = None) -> None:
        """Wait; `finished` is called with all generated tokens."""
        self.request = request
        self.number = 0
        self.sent_at = self.last_at = 0.0
        self.first_s: float | None = None
        self.is_done = False
        self.emitted: list[int] = []
        self.num_moves = self.num_prompt = self.num_cached = 0
        self.workers: list[str] = []
        self._finished = finished

    def note_claim(self, worker: str) -> None:
        """Note that a worker has begun it."""
        self.workers.append(worker)

    def note_loss(self) -> None:
        """Note that it has lost its worker."""
        self.num_moves += 1

    def note_first(self, first_s: float, num_prompt: int, num_cached: int) -> None:
        """Note its first token."""
        self.first_s, self.num_prompt, self.num_cached = first_s, num_prompt, num_cached

    def note_end(self, token_ids: list[int]) -> None:
        """Note that it is complete."""
        self.is_done = True
        if self._finished is not None:
            self._finished(token_ids)
