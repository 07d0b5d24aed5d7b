"""What has happened to one flight: deaths of workers that held it, and its attempts for its timeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter

import msgspec

from gateway.fleet.deaths import Death
from shared.receipt import Receipt
from shared.timeline import MAX_SEQUENCES, Attempt


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
