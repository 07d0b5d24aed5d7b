"""SmolLM3: Llama whose every fourth layer does not rotate."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder, without_rotation
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_rotating_layers, read_windows

ARCHITECTURE = "SmolLM3ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    rotates = read_rotating_layers(file)
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
        rope_theta=2e6,
    )
    return without_rotation(read_decoder(file, traits), rotates)
