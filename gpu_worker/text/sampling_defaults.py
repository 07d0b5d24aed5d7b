"""What a model's `generation_config.json` advises of sampling, for requests that do not say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.sampling import SamplingDefaults

_log = logging.getLogger(__name__)


def read_sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults | None:
    """Return what the content of a `generation_config.json` advises; None for nothing.

    A value that no request could have is left out with a warning: the model can be served without it.
    """
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(SamplingDefaults):
        value = generation_config.get(field.name)
        if value is None:
            continue
        try:
            values[field.name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            _log.warning("generation_config.json: %s is not used: %s", field.name, error)
    return SamplingDefaults(**values) if values else None
