"""SmolLM3: Llama whose every fourth layer does not rotate."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.layer_traits import AttentionShape, LayerTraits
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_windows

ARCHITECTURE = "SmolLM3ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    rotates = _rotating_layers(file)
    windows = None
    if file.boolean("use_sliding_window", False):
        windows = read_windows(file, lambda layer: not rotates[layer])
    bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias),
        mlp_bias=file.boolean("mlp_bias", False),
        layer_windows=windows,
        is_tied=True,
    )
    config = read_decoder(file, traits)
    return replace(config, layers=tuple(map(_layer, config.layers, rotates)))


def _layer(layer: LayerTraits, rotates: bool) -> LayerTraits:
    assert isinstance(layer.mixer, AttentionShape)
    return layer if rotates else replace(layer, mixer=replace(layer.mixer, rotary=None))


def _rotating_layers(file: JsonFile) -> tuple[bool, ...]:
    """Read `no_rope_layers`, which has 1 for layers that rotate."""
    num_layers = file.integer("num_hidden_layers", maximum=1024)
    interval = file.integer("no_rope_layer_interval", 4)
    flags = file.fields.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or set(flags) - {0, 1}:
        raise file.error("no_rope_layers", "must be 0 or 1 for each of the num_hidden_layers layers")
    return tuple(map(bool, flags))
