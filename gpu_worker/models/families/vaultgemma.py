"""VaultGemma: Gemma 2 without normalisations behind the blocks."""

from __future__ import annotations

from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.models.config import ModelConfig, read_decoder
from gpu_worker.models.families.gemma2 import gemma2_traits
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "VaultGemmaForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    names = TensorNames(before_feed_forward="pre_feedforward_layernorm")
    return read_decoder(file, gemma2_traits(file, ARCHITECTURE, names))
