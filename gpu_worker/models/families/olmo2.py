"""OLMo 2: normalisations after the blocks instead of before, and of all queries and keys as one vector."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "Olmo2ForCausalLM"

NAMES = TensorNames(
    before_mixer=None,
    after_mixer="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_decoder(file, olmo_traits(file, ARCHITECTURE))


def olmo_traits(file: JsonFile, architecture: str) -> FamilyTraits:
    """Return what OLMo 2 and 3 have in common."""
    bias = file.boolean("attention_bias", False)
    attention = AttentionShape(head_norm=HeadNorm.WHOLE, qkv_bias=bias, output_bias=bias)
    eps = ("rms_norm_eps", 1e-5)
    return FamilyTraits(architecture, attention=attention, block=BlockTraits(names=NAMES), norm_eps=eps)
