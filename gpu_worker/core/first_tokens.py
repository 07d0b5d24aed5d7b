"""Keeps a step short that completes the prompts of some clients, so that their first tokens come soon.

A step takes as long as all its tokens, so a short prompt whose step is filled up with another client's long prompts
waits for those, too. In a step that completes all prompts of the clients that were served least, the others therefore
get few tokens. They lose the fixed part of a step, which has to be taken once more. That may be `SHARE` of the time, so
clients that ask all the time do not slow the others down by more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step_time import StepTimeModel

SHARE = 0.1
LONGER = 1.25
"""How many times as long others may make the step."""
_MOST_STEPS = 4
"""So many steps may be kept short one after another."""


class FirstTokenSteps:
    """Limits the prompts of steps. Owns the time that may be spent on that."""

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self._saved_s = 0.0
        self._looked_at = math.inf

    def limit(self, prompts: Values[Sequence], num_decodes: int, budget: int, now: float) -> int:
        """Return how many tokens of prompts a step may compute, `budget` at most."""
        model, num_own = self._model, _num_completed(prompts, budget)
        if not num_own or not model.is_known:
            return budget
        alone_s = model.predict(num_decodes + 1, 0, num_own - 1)
        limit = num_own + int((LONGER - 1.0) * alone_s / model.token_s)
        if limit >= min(budget, sum([each.num_uncomputed_tokens for each in prompts])):
            return budget
        lost_s = model.predict(num_decodes, 0, 0)
        self._saved_s = min(self._saved_s + SHARE * max(0.0, now - self._looked_at), _MOST_STEPS * lost_s)
        self._looked_at = now
        if self._saved_s < lost_s:
            return budget
        self._saved_s -= lost_s
        return limit


def _num_completed(prompts: Values[Sequence], budget: int) -> int:
    """Return the tokens of the first clients all of whose prompts `budget` completes; 0 if those are all, or none."""
    num_of: dict[tuple[str, str], int] = {}
    for each in prompts:
        client = each.tenant, each.key
        num_of[client] = num_of.get(client, 0) + each.num_uncomputed_tokens
    num_completed = 0
    for num_tokens in num_of.values():
        if num_completed + num_tokens > budget:
            return num_completed
        num_completed += num_tokens
    return 0
