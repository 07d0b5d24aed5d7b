"""EuroBERT: Llama's layers with attention in both directions. It generates nothing."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rotary_encoder import read_rotary_encoder

ARCHITECTURE = "EuroBertModel"

_NAMES = TensorNames(unused=(r"lm_head\..*",))


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias),
        mlp_bias=file.boolean("mlp_bias", False),
        block=BlockTraits(names=_NAMES),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return read_rotary_encoder(file, traits)
