"""Generations of tenants whose answers carry a watermark: with the key for their model, or refused."""

from __future__ import annotations

import msgspec

from gateway.errors import ApiError
from gateway.generation import Generation
from shared.errors import BadRequestError
from shared.sampling import check_markable
from shared.watermark import derived_key


def with_watermark(generation: Generation, secret: str | None) -> Generation:
    """Return a generation with what marks its text, where the tenant has a secret and text is generated."""
    if secret is None or generation.pooling is not None:
        return generation
    key = derived_key(secret, generation.served_model)
    return msgspec.structs.replace(generation, sampling=msgspec.structs.replace(generation.sampling, watermark=key))


def check_watermark(generation: Generation) -> None:
    """Refuse a generation that is to carry a watermark and leaves nothing to chance.

    Raises:
        ApiError: 400.
    """
    if generation.sampling.watermark is None:
        return
    try:
        check_markable(generation.sampling)
    except BadRequestError as error:
        raise ApiError(400, str(error), param=error.param, code=error.code) from None
