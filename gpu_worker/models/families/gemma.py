"""Gemma: Llama with GELU, scaled embeddings, and weights of normalisations that are stored less one."""

from __future__ import annotations

from gpu_worker.layers.block_traits import BlockTraits, NormKind
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from kernels.activation import Activation

ARCHITECTURE = "GemmaForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. Its first release names another activation than it was trained with."""
    block = BlockTraits(norm=NormKind(is_offset=True), embedding_scale=file.integer("hidden_size") ** 0.5)
    traits = FamilyTraits(ARCHITECTURE, head_dim=256, block=block, activation=Activation.GELU_TANH, is_tied=True)
    return read_decoder(file, traits)
