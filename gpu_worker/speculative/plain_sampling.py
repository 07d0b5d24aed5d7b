"""How draft tokens are sampled: as their request's tokens are, less what drafts can do without."""

from __future__ import annotations

import msgspec

from shared.sampling import Sampling


def plain_sampling(sampling: Sampling) -> Sampling:
    """Return the parameters without log probabilities, and without penalties and grammar.

    What these keep of the tokens cannot be taken back.
    """
    return msgspec.structs.replace(
        sampling,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=None,
        prompt_logprobs=None,
        grammar=None,
    )
