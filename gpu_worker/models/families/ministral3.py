"""Ministral 3: Mistral whose queries grow with their position, beyond the length of the first training."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_uniform_windows
from gpu_worker.models.rope_config import read_query_growth

ARCHITECTURE = "Ministral3ForCausalLM"
SAMPLE = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "llama_4_scaling_beta": 0.1,
    }
}


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(query_growth=read_query_growth(file)),
        layer_windows=read_uniform_windows(file),
        norm_eps=("rms_norm_eps", 1e-5),
        max_model_len=file.integer("max_position_embeddings"),
    )
    return read_decoder(file, traits)
