"""A random model as llama.cpp's converter reads and writes it, by its family and options.

Options are those that the format can carry: where it has no field for something, that is as published models have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.gpu_worker.models.families.random_models import SIZES, eager_model

# Families whose normalisations are stored less one.
_LESS_ONE = ("Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText", "Gemma", "Gemma2", "Gemma3Text", "Nemotron")


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


def random_model(case: Converted, seed: int | None = None) -> Any:
    """Make a random model of a family, by default the same for the same case."""
    seed = len(repr(case)) if seed is None else seed
    model = eager_model(case.family, {**SIZES, **case.options}, seed=seed, model=case.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-2, 1)
            elif ".experts." in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif name == "lm_head.weight":
                # Rounding grows with the logits, which need not be large.
                parameter.mul_(0.35)
            elif case.family in _LESS_ONE and "norm" in name and "linear_attn" not in name:
                parameter.sub_(1 if name.endswith("weight") else 0)
    return model
