"""IQuest-Coder: Llama, with fields for clipped projections and windows that no published checkpoint sets."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "IQuestCoderForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration.

    Raises:
        CheckpointError: Projections are clipped, or layers have a window.
    """
    if "clip_qkv" in file.names():
        raise file.error("clip_qkv", "is set; supported: null, as in all published checkpoints")
    if file.boolean("use_sliding_window", False):
        raise file.error("use_sliding_window", "is true; supported: false, as in all published checkpoints")
    bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias),
        mlp_bias=file.boolean("mlp_bias", False),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return read_decoder(file, traits)
