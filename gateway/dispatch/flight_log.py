"""What has happened to one flight: deaths of workers that held it, its attempts for its timeline, evicted blocks.

The next attempt repeats the evictions by attention of those before it. Workers report them, and a worker may lie: only
evictions that a request of this budget and length can have made are kept, so the log takes fewer bytes than the tokens
beside it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from operator import itemgetter

import msgspec

from gateway.fleet.deaths import Death
from shared.kv_budget import EvictedBlocks, KvBudget
from shared.receipt import Receipt
from shared.timeline import MAX_SEQUENCES, Attempt

# Tokens that a worker may have computed and not sent yet.
_AHEAD = 4096


class EvictionLog:
    """Belongs to one flight."""

    def __init__(self) -> None:
        self._block_size = 0
        self._places = array("I")

    def add(self, told: EvictedBlocks, budget: KvBudget | None, num_tokens: int) -> bool:
        """Append the evictions of a delta; return False, without a change, if they are impossible.

        Args:
            told: An attempt that begins anew reports all of its own.
            budget: Of the request.
            num_tokens: Tokens of the prompt and of the output that are known.
        """
        if budget is None or budget.is_repeatable:
            return False
        num_known = len(self._places) if told.block_size == self._block_size else 0
        most = (num_tokens + _AHEAD) // told.block_size
        if told.first > num_known or told.first + len(told.places) > most:
            return False
        if max(told.places, default=0) >= budget.tokens // told.block_size:
            return False
        del self._places[told.first :]
        self._places.extend(told.places)
        self._block_size = told.block_size
        return True

    def told(self) -> EvictedBlocks:
        """Return all, for the next attempt."""
        return EvictedBlocks(self._block_size, tuple(self._places))


@dataclass(frozen=True, slots=True)
class Loss:
    """An attempt that ended with its worker.

    Attributes:
        is_solo: It alone was on probation or had produced nothing there, so that nothing else is to blame.
    """

    death: Death
    epoch: int
    is_solo: bool


@dataclass(slots=True)
class FlightLog:
    """Attempts of one flight: why the present one was made and since when a worker has it, and those before it.

    Times are loop times; the timeline converts them to the request's clock. Receipts are by epoch. `published_at` is
    when the present attempt was published, if a pause has moved the flight's own time since; pauses are as there.
    """

    claimed_at: float | None = None
    published_at: float | None = None
    pauses: list[tuple[float, float]] = field(default_factory=list)
    num_pauses: int = 0
    paused_s: float = 0.0
    why: str = "first"
    ended: list[Attempt] = field(default_factory=list)
    receipts: dict[int, Receipt] = field(default_factory=dict)

    def note_pause(self, ended_at: float, lost_s: float) -> None:
        """Count a pause of the present attempt, and list it while it is among the longest."""
        self.num_pauses += 1
        self.paused_s += lost_s
        self.pauses.append((ended_at, lost_s))
        if len(self.pauses) > MAX_SEQUENCES:
            self.pauses.remove(min(self.pauses, key=itemgetter(1)))

    def end(self, attempt: Attempt) -> None:
        """Add the present attempt to those that have ended; the next one is made for the reason that it ended."""
        if len(self.ended) < MAX_SEQUENCES:
            self.ended.append(attempt)
        self.claimed_at, self.published_at, self.why = None, None, attempt.end
        self.pauses, self.num_pauses, self.paused_s = [], 0, 0.0

    def earlier(self, began_at: float) -> list[Attempt]:
        """Return the attempts that have ended, with times since `began_at`."""
        return [
            msgspec.structs.replace(
                each,
                published_s=max(0.0, each.published_s - began_at),
                claimed_s=None if each.claimed_s is None else max(0.0, each.claimed_s - began_at),
                ended_s=max(0.0, each.ended_s - began_at),
                receipt=self.receipts.get(each.epoch),
                pauses=tuple((max(0.0, at - began_at), lost_s) for at, lost_s in each.pauses),
            )
            for each in self.ended
        ]
