"""Reads which layers of a model are recurrent, and the sizes of gated delta nets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gpu_worker.layers.layer_traits import GatedDeltaShape, LayerTraits, MixerShape
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


def read_layer_types(file: JsonFile, kinds: tuple[str, ...], interval: int | None = None) -> tuple[str, ...]:
    """Read the kind of each layer.

    Args:
        file: Has `layer_types`.
        kinds: Those that the family has.
        interval: Where `layer_types` is absent, each so many-th layer is of the last kind, the others of the first;
            None requires the field.

    Raises:
        CheckpointError: A kind is unknown, or their number is wrong.
    """
    num_layers = file.integer("num_hidden_layers", maximum=1024)
    types = file.texts("layer_types")
    if not types and interval is not None:
        interval = file.integer("full_attention_interval", interval, maximum=1024)
        return tuple(kinds[0] if (layer + 1) % interval else kinds[-1] for layer in range(num_layers))
    if len(types) != num_layers or set(types) - set(kinds):
        problem = f"must name one of {', '.join(kinds)} for each of the num_hidden_layers ({num_layers}) layers"
        raise file.error("layer_types", problem)
    return types


def with_mixers(config: ModelConfig, types: tuple[str, ...], mixers: Mapping[str, MixerShape]) -> ModelConfig:
    """Return the model with other mixers in the layers of these kinds."""
    layers = tuple(
        LayerTraits(mixers.get(kind, layer.mixer), layer.feed_forward)
        for kind, layer in zip(types, config.layers, strict=True)
    )
    return dataclasses.replace(config, layers=layers)
