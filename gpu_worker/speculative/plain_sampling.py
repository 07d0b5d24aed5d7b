"""How a guess is drawn: as its request's tokens are, less what a guess can do without."""

from __future__ import annotations

import msgspec

from shared.messages import Sampling


def plain_sampling(sampling: Sampling) -> Sampling:
    """Return the parameters without penalties, whose counts only grow whereas guesses are taken back, or reports."""
    return msgspec.structs.replace(
        sampling,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=None,
        prompt_logprobs=None,
    )
