"""Saves small random models of any family that `transformers` has, which is the oracle."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.gpu_worker.models.variants import new_model, randomize

SIZES: Mapping[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A family, by the beginning of its class's name, with options of its configuration.

    Attributes:
        dtype: What is saved; the oracle computes in float32 with the same numbers.
        saved: Options of `save_pretrained`.
        model: Beginning of the model's class, where it is not that of the configuration's.
        architecture: What published checkpoints are called, where it is not the model's class.
    """

    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    saved: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    architecture: str | None = None


def case(
    family: str,
    *bases: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    saved: Mapping[str, Any] | None = None,
    model: str | None = None,
    architecture: str | None = None,
    **options: Any,
) -> Case:
    """Return a case with the options of `bases`, and others over them."""
    merged = {name: value for base in (*bases, options) for name, value in base.items()}
    return Case(family, merged, dtype, saved or {}, model, architecture)


def save_case(case: Case, directory: Path) -> Any:
    """Save a random model, and return it."""
    model = new_model(case.family, {**SIZES, **case.options}, seed=len(repr(case)), model=case.model)
    randomize_all(model)
    with torch.no_grad():
        # Biases of routers may be buffers.
        for stored in model.state_dict().values():
            stored.copy_(stored.to(case.dtype) if stored.is_floating_point() else stored)
    # A copy, because frequencies of the rotation would be rounded with the weights.
    copy.deepcopy(model).to(case.dtype).save_pretrained(directory, **case.saved)
    if case.architecture is not None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [case.architecture]}))
    return model


def eager_model(family: str, options: Mapping[str, Any], *, seed: int, model: str | None = None) -> Any:
    """Make a random model, as `new_model`, whose experts are the plain formula, which computes in float64 too."""
    # A copy: `transformers` changes what it is given.
    made = new_model(family, copy.deepcopy(dict(options)), seed=seed, model=model)
    made.config._experts_implementation = "eager"
    randomize_all(made)
    return made


def randomize_all(model: torch.nn.Module) -> None:
    """Do what `randomize` does, for buffers of routers and vectors of any name too."""
    with torch.no_grad():
        vectors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dim() == 1]
        for vector in vectors:
            vector.data = vector.data[None]
        randomize(model)
        for vector in vectors:
            vector.data = vector.data[0]
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.normal_(0, 0.5)
