"""A random model as llama.cpp's converter reads and writes it, by its family and options.

Options are those that the format can carry: where it has no field for something, that is as published models have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.gpu_worker.models.families.random_models import SIZES, eager_model

# Options that several families or several ways to write a file share.
THETA: Mapping[str, Any] = {"rope_theta": 500.0}
PLAIN: Mapping[str, Any] = {"rope_type": "default", **THETA}
HALF: Mapping[str, Any] = {**PLAIN, "partial_rotary_factor": 0.5}
YARN: Mapping[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA}
WINDOW: Mapping[str, Any] = {"sliding_window": 8, "head_dim": 16}
GRANITE: Mapping[str, Any] = {
    "attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
}  # fmt: skip
GEMMA3: Mapping[str, Any] = {
    **WINDOW,
    "query_pre_attn_scalar": 16,
    "num_hidden_layers": 7,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
GEMMA4: Mapping[str, Any] = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 0, "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}  # fmt: skip
# Multipliers are powers of two, which change no rounding.
FALCON: Mapping[str, Any] = {
    "lm_head_multiplier": 0.5, "embedding_multiplier": 4.0, "mlp_multipliers": [0.5, 2.0], "key_multiplier": 0.5,
    "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.25, "ssm_multipliers": [0.5, 2.0, 1.0, 0.25, 4.0],
    "ssm_in_multiplier": 0.5, "ssm_out_multiplier": 2.0, "head_dim": 16, "mamba_norm_before_gate": False,
}  # fmt: skip
LFM2: Mapping[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
    "block_auto_adjust_ff_dim": False,
}

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
        kind: What matrices are stored as; vectors, routers and convolutions are F32.
        blocks: What matrices are stored as, by their names: blocks of random bits, whose numbers the oracle gets.
        whole_up: What makes keys and values of latent vectors is one matrix, as older converters wrote it.
        num_drafting: Layers behind the last one, which the file has and the model does not use.
        fuses_inputs: Queries, keys, values and gates of states are one matrix, as the first converters left them.
    """

    architecture: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    published: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "F32"
    blocks: Callable[[str], str] | None = None
    whole_up: bool = False
    num_drafting: int = 0
    fuses_inputs: bool = False


def is_less_one(case: Converted, name: str) -> bool:
    """Whether a checkpoint holds this weight less one."""
    return case.family in _LESS_ONE and "norm" in name and "linear_attn" not in name and name.endswith("weight")


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
            elif is_less_one(case, name):
                parameter.sub_(1)
    return model
