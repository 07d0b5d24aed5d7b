"""Keeps steps short for the sake of first tokens: those that give some, and those in which a prompt may come.

A step takes as long as all its tokens, so a short prompt waits for another client's long ones twice: until the step
under way ends, and while they fill up its own.

- While a client was seen lately that has no prompt now, steps are so short that the others lose `WAITING_SHARE` of
  their prompts' speed. Where a step has a large fixed part that is hardly shorter than a full one.
- In a step that completes all prompts of the clients that were served least, the others get few tokens. They lose the
  fixed part of a step, which has to be taken once more. That may be `SHARE` of the time, so clients that ask all the
  time do not slow the others down by more.
- A step under way is given up where a client that is not in it would wait for long for its first token, and the runner
  can. The others lose the computed part, out of the same share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values

from msgspec import Struct

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledStep
from gpu_worker.core.step_time import StepTimeModel

SHARE = 0.1
WAITING_SHARE = 0.05
LONGER = 1.25
"""How many times as long others may make the step."""
_MOST_STEPS = 4
"""Savings pay for at most this many consecutive short steps."""
_MEMORY_S = 10.0
"""Seconds after a client's last prompt during which another one is expected."""

_Client = tuple[str, str]


class StepUnderWay(Struct, frozen=True):
    """A step that may be given up.

    Attributes:
        clients: Whose sequences it computes.
        began: In monotonic seconds.
        duration_s: Predicted.
    """

    step: int
    clients: frozenset[_Client]
    num_decodes: int
    began: float
    duration_s: float


class FirstTokenSteps:
    """Limits the prompts of steps. Owns the time that may be spent on that, and when clients were seen last."""

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self._saved_s = 0.0
        self._looked_at = -math.inf
        # The longest absent first.
        self._seen: dict[_Client, float] = {}

    def limit(self, prompts: Values[Sequence], num_decodes: int, budget: int, now: float) -> int:
        """Return how many tokens of prompts, in their order, a step may compute, `budget` at most."""
        num_of: dict[_Client, int] = {}
        for each in prompts:
            client = each.tenant, each.key
            num_of[client] = num_of.get(client, 0) + each.num_uncomputed_tokens
        self._note(num_of, now)
        if not self._model.is_known or len(self._seen) == 1:
            return budget
        limit = self._of_first_tokens(num_of, num_decodes, budget, now) if len(num_of) > 1 else budget
        # Prompts that need one step or have images may never advance in short steps.
        if limit < budget or len(self._seen) == len(num_of) or any(s.needs_one_step or s.media for s in prompts):
            return limit
        return min(limit, self._while_others_may_come(num_decodes, budget))

    def _note(self, clients: dict[_Client, int], now: float) -> None:
        for client in clients:
            self._seen.pop(client, None)
            self._seen[client] = now
        while self._seen[oldest := next(iter(self._seen))] < now - _MEMORY_S:
            del self._seen[oldest]

    def _of_first_tokens(self, num_of: dict[_Client, int], num_decodes: int, budget: int, now: float) -> int:
        model, num_own = self._model, _num_completed(num_of, budget)
        if not num_own:
            return budget
        alone_s = model.predict(num_decodes + 1, 0, num_own - 1)
        limit = num_own + int((LONGER - 1.0) * alone_s / model.token_s)
        if limit >= min(budget, sum(num_of.values())):
            return budget
        lost_s = model.predict(num_decodes, 0, 0)
        if self._available_s(lost_s, now) < lost_s:
            return budget
        self._spend(lost_s, lost_s, now)
        return limit

    def _available_s(self, fixed_s: float, now: float) -> float:
        return min(self._saved_s + SHARE * max(0.0, now - self._looked_at), _MOST_STEPS * fixed_s)

    def _spend(self, seconds: float, fixed_s: float, now: float) -> None:
        self._saved_s = max(0.0, self._available_s(fixed_s, now) - seconds)
        self._looked_at = now

    def under_way(self, step: ScheduledStep, now: float) -> StepUnderWay | None:
        """Describe a step with prompts that begins at `now`; None where it may not be given up.

        What changes more than blocks that are written again (images, keys that turn), and what needs a whole step, is
        computed to its end.
        """
        plan, num_decodes, num_batch = step.plan, step.num_decodes, step.num_batch
        if not self._model.is_known or plan.encodes or plan.evictions:
            return None
        if step.is_alone or any(item.sequence.needs_one_step for item in step.scheduled):
            return None
        num_sequences = len(step.scheduled)
        duration_s = self._model.predict(num_sequences - num_batch, num_batch, step.num_tokens - num_sequences)
        clients = frozenset((item.sequence.tenant, item.sequence.key) for item in step.scheduled[num_decodes:])
        return StepUnderWay(step.step, clients, num_decodes, now, duration_s)

    def is_worth_giving_up(self, step: StepUnderWay, sequence: Sequence, now: float) -> bool:
        """Return whether to give up a step for the first token of a sequence that has just come.

        It only reads, so any thread may ask.
        """
        if sequence.lane != "interactive" or (sequence.tenant, sequence.key) in step.clients:
            return False
        model, done_s = self._model, now - step.began
        fixed_s = model.predict(step.num_decodes, 0, 0)
        alone_s = model.predict(step.num_decodes + 1, 0, len(sequence.token_ids) - 1)
        is_long = step.duration_s - done_s > (LONGER - 1.0) * alone_s
        return is_long and self._available_s(fixed_s, now) >= done_s

    def give_up(self, step: StepUnderWay, now: float) -> None:
        """Charge the others for a step that was given up."""
        self._spend(now - step.began, self._model.predict(step.num_decodes, 0, 0), now)

    def _while_others_may_come(self, num_decodes: int, budget: int) -> int:
        """Return the tokens of a step that computes prompts at `1 - WAITING_SHARE` of the speed of a full one."""
        model = self._model
        fixed_s = model.predict(num_decodes + 1, 0, 0)
        full_s = model.predict(num_decodes + 1, 0, budget - 1)
        length_s = fixed_s / (1.0 - (1.0 - WAITING_SHARE) * (1.0 - fixed_s / full_s))
        return min(budget, 1 + math.ceil((length_s - fixed_s) / model.token_s))


def _num_completed(num_of: dict[_Client, int], budget: int) -> int:
    """Return the tokens of the first clients all of whose prompts `budget` completes; 0 if those are all, or none."""
    num_completed = 0
    for num_tokens in num_of.values():
        if num_completed + num_tokens > budget:
            return num_completed
        num_completed += num_tokens
    return 0
