"""What a model's files advise of sampling, in the place of what a client has left out."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from gateway.generation import Generation
from shared.sampling import SamplingDefaults


def with_defaults(generation: Generation, defaults: SamplingDefaults | None) -> Generation:
    """Return a generation with its model's defaults for the parameters that its client left out."""
    if defaults is None or not generation.left_out:
        return generation
    advised: dict[str, Any] = {
        name: value for name in generation.left_out if (value := getattr(defaults, name)) is not None
    }
    if not advised:
        return generation
    is_deterministic = generation.deterministic
    if advised.get("temperature") == 0 and not is_deterministic:
        # As for clients that ask for a temperature of 0: equal requests look equal.
        advised["seed"], is_deterministic = 0, True
    sampling = msgspec.structs.replace(generation.sampling, **advised)
    return dataclasses.replace(generation, sampling=sampling, deterministic=is_deterministic)
