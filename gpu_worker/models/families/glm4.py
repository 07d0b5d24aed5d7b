"""GLM-4-0414 (dense): GLM with normalisations after the blocks too."""

from __future__ import annotations

from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.models.config import ModelConfig, read_decoder
from gpu_worker.models.families.glm import glm_traits
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "Glm4ForCausalLM"

_NAMES = TensorNames(
    after_mixer="post_self_attn_layernorm",
    after_feed_forward="post_mlp_layernorm",
    gate_up=("gate_up_proj",),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_decoder(file, glm_traits(file, ARCHITECTURE, _NAMES))
