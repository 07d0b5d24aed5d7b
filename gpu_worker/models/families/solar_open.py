"""Solar Open: Llama's attention, and GLM's routing and shared expert in every layer."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, read_grouped_sigmoid, with_silu_mixtures

ARCHITECTURE = "SolarOpenForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    shape = read_grouped_sigmoid(file, 1280)
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(qkv_bias=file.boolean("attention_bias", False)),
        inner_size=shape.expert_size,
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=1e6,
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))
