"""What a model's files advise of sampling, in the place of what a client has left out."""

from __future__ import annotations

import msgspec

from gateway.api.schemas.best_of import without_ranking
from gateway.generation import Generation
from shared.sampling import SamplingDefaults, with_advice


def with_defaults(generation: Generation, defaults: SamplingDefaults | None) -> Generation:
    """Return a generation with its model's defaults for the parameters that its client left out."""
    sampling = with_advice(generation.sampling, generation.left_out, defaults)
    if sampling is generation.sampling:
        return generation
    is_deterministic = generation.deterministic
    if sampling.temperature == 0 and not is_deterministic:
        # As for clients that ask for a temperature of 0: equal requests look equal.
        sampling, is_deterministic = msgspec.structs.replace(sampling, seed=0), True
    advised = msgspec.structs.replace(generation, sampling=sampling, deterministic=is_deterministic)
    return without_ranking(advised) if sampling.temperature == 0 else advised
