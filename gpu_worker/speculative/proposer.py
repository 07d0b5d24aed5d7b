"""What a proposer is: it guesses how sequences go on."""

from __future__ import annotations

from collections.abc import Sequence as Values
from typing import Protocol

from msgspec import Struct

from gpu_worker.core.sequence import Sequence


class DraftRequest(Struct, frozen=True, gc=False):
    """Ask for at most `num_tokens` guesses of what follows `sequence.token_ids`, all of which are known."""

    sequence: Sequence
    num_tokens: int


class Proposer(Protocol):
    """Guesses tokens. Called by the thread that executes steps; reads sequences, and writes nothing to them.

    Guesses are verified, so they may be anything: too many are cut off, and so is everything from one on that is no
    token.
    """

    def propose(self, requests: Values[DraftRequest]) -> list[tuple[int, ...]]:
        """Return one guess a request, first token first; an empty one where nothing can be said."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has left the batch; it may come back later."""
        ...
