"""The sampling parameters of draft tokens: those of their request, without penalties and log probabilities."""

from __future__ import annotations

import msgspec

from shared.messages import Sampling


def plain_sampling(sampling: Sampling) -> Sampling:
    """Return parameters for drafts. Penalties count tokens, and rejected drafts could not be taken out of those."""
    return msgspec.structs.replace(
        sampling,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=None,
        prompt_logprobs=None,
    )
