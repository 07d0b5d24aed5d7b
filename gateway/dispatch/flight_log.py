"""The attempts at a flight, as they end: what `Recovery` and the frames tell of them, in the order of their epochs."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from shared.receipt import Receipt
from shared.timeline import MAX_SEQUENCES, Attempt
from shared.worker_metrics import MAX_RANKS

# Between two clocks that run at different speeds, and frames under way.
_SLACK_S = 1.0


@dataclass(slots=True)
class FlightLog:
    """Attempts of one flight. Times are loop times here, and become those of the request when it is told.

    Attributes:
        claimed_at: When a worker said that it has the present attempt; None while none has.
        why: Why the present attempt was made.
        ended: The attempts before it.
        receipts: By epoch.
    """

    claimed_at: float | None = None
    why: str = "first"
    ended: list[Attempt] = field(default_factory=list)
    receipts: dict[int, Receipt] = field(default_factory=dict)

    def end(self, attempt: Attempt) -> None:
        """Add the present attempt to those that have ended; the next one is made for the reason that it ended."""
        if len(self.ended) < MAX_SEQUENCES:
            self.ended.append(attempt)
        self.claimed_at, self.why = None, attempt.end

    def told(self, last: Attempt | None, began_at: float) -> list[Attempt]:
        """Return all attempts, with times since `began_at`; `last` is the present one."""
        attempts = self.ended if last is None else [*self.ended, last]
        return [
            msgspec.structs.replace(
                each,
                published_s=max(0.0, each.published_s - began_at),
                claimed_s=None if each.claimed_s is None else max(0.0, each.claimed_s - began_at),
                ended_s=max(0.0, each.ended_s - began_at),
                receipt=self.receipts.get(each.epoch),
            )
            for each in attempts
        ]


def bounded_receipt(receipt: Receipt, claimed_at: float | None, now: float) -> Receipt:
    """Return a receipt of no more device time than can have passed since its attempt was claimed.

    Tenants pay by it, and one worker must not be able to charge them at will.
    """
    passed_s = _SLACK_S if claimed_at is None else now - claimed_at + _SLACK_S
    most_s = max(0.0, passed_s) * min(receipt.num_devices, MAX_RANKS)
    if receipt.device_s <= most_s:
        return receipt
    part = most_s / receipt.device_s
    return msgspec.structs.replace(
        receipt,
        device_s=most_s,
        prefill_s=receipt.prefill_s * part,
        rejected_s=receipt.rejected_s * part,
        recomputed_s=receipt.recomputed_s * part,
        energy_j=None if receipt.energy_j is None else receipt.energy_j * part,
    )
