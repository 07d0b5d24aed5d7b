"""What GGUF metadata say about Apertus, whose converter writes the numbers of each layer's function there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.plain_mlp import PlainShape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families import apertus
from gpu_worker.models.gguf_fields import MAX_HEADS, Fields, TranslatedFamily, has_qkv_bias, layer_parts, with_rope
from gpu_worker.models.gguf_layers import num_layers
from gpu_worker.quantization.gguf.file import GGUFFile
from kernels.activation import Xielu

# In the order of `Xielu.learned`. These fields have no architecture before their names.
_LEARNED = ("alpha_p", "alpha_n", "beta", "eps")


def _fields(file: GGUFFile, prefix: str) -> Fields:
    metadata = file.metadata
    return {
        "num_key_value_heads": metadata.integer(f"{prefix}.attention.head_count_kv", maximum=MAX_HEADS),
        "attention_bias": has_qkv_bias(layer_parts(file)),
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length"),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 10_000.0),
    }


def _finish(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    """Give each layer its function; the rotation's scaling is a tensor."""
    numbers = zip(*(_by_layer(file, prefix, f"xielu.{name}") for name in _LEARNED), strict=True)
    layers = tuple(_with(layer, Xielu.learned(*learned)) for layer, learned in zip(config.layers, numbers, strict=True))
    return with_rope(file, prefix, replace(config, layers=layers))


def _with(layer: LayerTraits, activation: Xielu) -> LayerTraits:
    assert isinstance(layer.feed_forward, PlainShape)
    return replace(layer, feed_forward=replace(layer.feed_forward, activation=activation))


def _by_layer(file: GGUFFile, prefix: str, field: str) -> list[float]:
    """Read a number of each layer, or one that all layers have."""
    metadata, count = file.metadata, num_layers(file, prefix)
    value = metadata.fields.get(field)
    if isinstance(value, float) and np.isfinite(value):
        return [value] * count
    return [float(number) for number in metadata.numbers(field, count)]


APERTUS = TranslatedFamily(apertus.read_config, _fields, _finish)
"""Files of this architecture."""
