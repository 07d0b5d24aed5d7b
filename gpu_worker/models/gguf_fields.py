"""What translations of GGUF metadata into the fields of `config.json` have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_layers import num_layers
from gpu_worker.models.gguf_rope import reached_len, read_gguf_rope
from gpu_worker.models.json_file import JsonFile
from gpu_worker.quantization.gguf.file import GGUFFile

Fields = dict[str, Any]

MAX_HEADS = 1024
"""The most heads that a layer may have."""


@dataclass(frozen=True, slots=True)
class TranslatedFamily:
    """How a family's metadata become fields, and what its converter does to a model besides.

    Attributes:
        read_config: Of the family.
        fields: Those of its own, by the file and its architecture.
        finish: Turns the configuration of a checkpoint into that of the file.
    """

    read_config: Callable[[JsonFile], ModelConfig]
    fields: Callable[[GGUFFile, str], Fields]
    finish: Callable[[GGUFFile, str, ModelConfig], ModelConfig] = lambda file, prefix, config: config


def by_layer(file: GGUFFile, field: str, default: int | None = None) -> list[int]:
    """Read a number that all layers have, or one for each.

    Raises:
        GGUFError: There are fewer than layers.
    """
    metadata, count = file.metadata, num_layers(file, field.partition(".")[0])
    value = metadata.fields.get(field, default)
    if not isinstance(value, list | np.ndarray):
        return [metadata.integer(field, default, minimum=0)] * count
    numbers = [int(number) for number in metadata.numbers(field, len(value))]
    if len(numbers) < count or min(numbers) < 0:
        raise metadata.error(field, f"has {len(numbers)} numbers; it must have {count}, none of them below 0")
    return numbers[:count]


def state_heads(file: GGUFFile, prefix: str) -> tuple[int, int]:
    """Read how many heads states have, and the features of each.

    Raises:
        GGUFError: The features do not make whole heads.
    """
    metadata, heads, size = file.metadata, f"{prefix}.ssm.time_step_rank", f"{prefix}.ssm.inner_size"
    num_heads, inner = metadata.integer(heads, maximum=MAX_HEADS), metadata.integer(size)
    if inner % num_heads:
        raise metadata.error(size, f"is {inner}; it must be a multiple of {heads} ({num_heads})")
    return num_heads, inner // num_heads


def layer_parts(file: GGUFFile) -> frozenset[str]:
    """Return the names that tensors of layers have behind the layer's number."""
    return frozenset(name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.") and name.count(".") > 1)


def has_qkv_bias(parts: frozenset[str]) -> bool:
    """Whether queries, keys and values have biases, by what `layer_parts` returned."""
    return not parts.isdisjoint(("attn_q.bias", "attn_qkv.bias"))


def with_rope(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    """Return the model with the rotation that the file names.

    Raises:
        GGUFError: No layer attends.
    """
    attention = next((layer.mixer for layer in config.layers if hasattr(layer.mixer, "rotary_dim")), None)
    if attention is None:
        field = f"{prefix}.block_count"
        raise file.metadata.error(
            field, f"is {config.num_layers}, and none of these layers attends; copy the file again"
        )
    rotary_dim = getattr(attention, "rotary_dim", None) or config.head_dim
    rope = read_gguf_rope(file, prefix, rotary_dim, config.max_model_len)
    return replace(config, rope=rope, max_model_len=reached_len(rope, config.max_model_len))


def finish_mixtures(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    """Return the model with the names and the rotation that files with mixtures have, whatever family it is."""
    return with_rope(file, prefix, with_plain_names(config))


def with_plain_names(config: ModelConfig) -> ModelConfig:
    """Return the model whose mixtures have the names that tensors of such files are given, whatever family it is."""
    layers = tuple(
        replace(layer, feed_forward=replace(layer.feed_forward, names=MixtureNames()))
        if isinstance(layer.feed_forward, MixtureShape)
        else layer
        for layer in config.layers
    )
    return replace(config, layers=layers)
