"""Phi-3 and Phi-4: Llama with matrices that are stored as one, heads that turn in part, and LongRoPE."""

from __future__ import annotations

from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_uniform_windows

ARCHITECTURE = "Phi3ForCausalLM"
SAMPLE = {
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12},
}

_NAMES = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = FamilyTraits(
        ARCHITECTURE,
        layer_windows=read_uniform_windows(file),
        block=BlockTraits(names=_NAMES),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return read_decoder(file, traits)
