"""A checkpoint for llama.cpp's own converter, by its family and options.

Options are those that the format can carry: where it has no field for something, that is as published models have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Converted:
    """A family, by the beginnings of its classes' names, with options of its configuration.

    Attributes:
        architecture: What llama.cpp calls it.
        model: Beginning of the model's class, where it is not that of the configuration's.
        published: Fields that published checkpoints have in `config.json`, and the converter reads, beyond what
            `transformers` writes there.
    """

    architecture: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    published: Mapping[str, Any] = field(default_factory=dict)
