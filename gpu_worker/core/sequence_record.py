"""What a sequence has taken of the device, and when: the worker's part of its timeline and of its receipt.

The scheduler writes it, once per step, and the consumer reads it when the request ends. Its size is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_PARTS = 16
"""Parts of prefills, and preemptions, that are told apart; later parts are added to the last one."""


@dataclass(slots=True)
class PrefillRecord:
    """Steps that computed more than a decode: when the first began, when the last landed, and their tokens."""

    began_at: float
    landed_at: float
    num_tokens: int


@dataclass(slots=True)
class SequenceRecord:
    """Times are monotonic seconds, shares seconds of the device.

    Attributes:
        device_s: Its shares of all steps; the other shares are parts of this one.
        prefill_s: Of steps that computed more than a decode.
        rejected_s: Of drafts that were not accepted.
        recomputed_s: Of tokens that had been computed before a preemption.
        num_lost_tokens: Tokens that were computed before the last preemption.
        prefills: Of the prompt, and of what a preemption lost.
        preempted_at: The first preemptions.
        is_closed: Its receipt is written. The one attribute that the consumer writes: it ends requests while the engine
            computes for them.
    """

    device_s: float = 0.0
    prefill_s: float = 0.0
    rejected_s: float = 0.0
    recomputed_s: float = 0.0
    num_lost_tokens: int = 0
    prefills: list[PrefillRecord] = field(default_factory=list)
    preempted_at: list[float] = field(default_factory=list)
    is_closed: bool = False

    def preempt(self, num_computed_tokens: int, now: float) -> None:
        """Note that what was computed is lost."""
        self.num_lost_tokens = max(self.num_lost_tokens, num_computed_tokens)
        if len(self.preempted_at) < MAX_PARTS:
            self.preempted_at.append(now)

    def prefill(self, start: int, num_tokens: int, share_s: float, began_at: float, landed_at: float) -> None:
        """Note a step that computed a part of the known tokens."""
        self.prefill_s += share_s
        num_again = min(start + num_tokens, self.num_lost_tokens) - start
        if num_again > 0:
            self.recomputed_s += share_s * num_again / num_tokens
        if len(self.prefills) < MAX_PARTS:
            self.prefills.append(PrefillRecord(began_at, landed_at, num_tokens))
        else:
            self.prefills[-1].landed_at = landed_at
            self.prefills[-1].num_tokens += num_tokens
