"""Puts recurrent mixers into layers, and reads the sizes of gated delta nets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.layers.layer import LayerTraits, MixerShape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from kernels.gated_delta import DeltaSizes

MAX_CONV_WIDTH = 16


def read_gated_delta(file: JsonFile, *, by_key_head: bool) -> GatedDeltaShape:
    """Read the sizes of gated delta nets, under the names that Qwen has for them.

    Raises:
        CheckpointError: A number is missing or cannot be served.
    """
    num_key_heads = file.integer("linear_num_key_heads", 16, maximum=1024)
    num_value_heads = file.integer("linear_num_value_heads", 32, maximum=1024)
    if num_value_heads % num_key_heads:
        problem = f"is {num_value_heads}; it must be a multiple of linear_num_key_heads ({num_key_heads})"
        raise file.error("linear_num_value_heads", problem)
    activation = file.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        problem = f"is {activation[:80]!r}; the convolutions of recurrent layers are served with 'silu'"
        raise file.error("hidden_act", problem)
    sizes = DeltaSizes(
        num_key_heads,
        num_value_heads,
        file.integer("linear_key_head_dim", 128, maximum=256),
        file.integer("linear_value_head_dim", 128, maximum=1024),
    )
    width = file.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_CONV_WIDTH)
    return GatedDeltaShape(sizes, width, by_key_head)


def with_mixers(config: ModelConfig, types: tuple[str, ...], mixers: Mapping[str, MixerShape]) -> ModelConfig:
    """Return the model with other mixers in the layers of these kinds."""
    layers = tuple(
        LayerTraits(mixers.get(kind, layer.mixer), layer.feed_forward)
        for kind, layer in zip(types, config.layers, strict=True)
    )
    return dataclasses.replace(config, layers=layers)
