"""GLM-4 of 2024 (GLM): Llama whose heads turn by half, neighbouring dimensions together."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "GlmForCausalLM"

_NAMES = TensorNames(gate_up=("gate_up_proj",))


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_decoder(file, glm_traits(file, ARCHITECTURE, _NAMES))


def glm_traits(file: JsonFile, architecture: str, names: TensorNames) -> FamilyTraits:
    """Return what the dense models have in common."""
    return FamilyTraits(
        architecture,
        head_dim=128,
        attention=AttentionShape(interleaved=True, qkv_bias=file.boolean("attention_bias", True)),
        block=BlockTraits(names=names),
        norm_eps=("rms_norm_eps", 1.5625e-07),
        rotary_share=0.5,
    )
