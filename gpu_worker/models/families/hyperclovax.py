"""HyperCLOVA X: Granite's factors, with a normalisation behind each block too, and logits that are multiplied."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.models.config import ModelConfig, read_decoder
from gpu_worker.models.families.granite import granite_traits
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "HyperCLOVAXForCausalLM"
SAMPLE = {"attention_multiplier": 0.1, "residual_multiplier": 0.2, "embedding_multiplier": 12.0, "logits_scaling": 8.0}

_NAMES = TensorNames(after_mixer="post_norm1", after_feed_forward="post_norm2")


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = granite_traits(file, ARCHITECTURE)
    assert traits.attention is not None
    attention = traits.attention
    if "attention_multiplier" not in file.names():
        attention = replace(attention, scale=None)
    names = _NAMES if file.boolean("use_post_norm", True) else TensorNames()
    block = replace(traits.block, names=names, logit_scale=file.number("logits_scaling", 1.0))
    return read_decoder(file, replace(traits, attention=attention, block=block))
