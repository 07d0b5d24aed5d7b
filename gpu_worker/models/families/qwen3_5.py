"""Qwen3.5 and 3.6 (dense, text part): three gated delta nets to each layer of gated attention with partial rotation.

The models with a vision tower are served without it.
"""

from __future__ import annotations

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.hybrid_config import read_gated_delta, read_layer_types, with_mixers
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.qwen_hybrid import HYBRID_TYPES, read_gated_attention_decoder
from gpu_worker.models.text_part import text_part

ARCHITECTURE = "Qwen3_5ForCausalLM"
ALSO = ("Qwen3_5ForConditionalGeneration",)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    file = text_part(file)
    config = read_gated_attention_decoder(file, ARCHITECTURE)
    types = read_layer_types(file, HYBRID_TYPES, interval=4)
    return with_mixers(config, types, {HYBRID_TYPES[0]: read_gated_delta(file, by_key_head=False)})
