"""Qwen2 and Qwen2.5: query, key and value biases, and an optional sliding window in some layers.

Qwen2-VL and Qwen2.5-VL are served without their vision towers.
"""

from __future__ import annotations

from gpu_worker.layers.layer_traits import AttentionShape
from gpu_worker.models.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_optional_windows
from gpu_worker.models.text_part import text_names, text_part

ARCHITECTURE = "Qwen2ForCausalLM"
ALSO = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    file = text_part(file)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=True),
        layer_windows=read_optional_windows(file),
        block=BlockTraits(names=text_names(TensorNames())),
    )
    return read_decoder(file, traits)
