"""Mamba-2 itself: one block a layer, no attention anywhere."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.block_traits import BlockTraits
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.families import nemotron_h
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mamba2_config import Mamba2Fields, read_mamba2

ARCHITECTURE = "Mamba2ForCausalLM"
SAMPLE = {"num_heads": 8, "state_size": 64, "n_groups": 2}

# Where the configuration does not say how long sequences get. Published models have seen 2,048 tokens; no memory grows
# with a sequence, but the scheduler counts its blocks all the same.
_MAX_LEN = 8192
_FIELDS = Mamba2Fields(
    num_heads="num_heads",
    head_dim="head_dim",
    num_groups="n_groups",
    state_size="state_size",
    conv_width="conv_kernel",
    conv_bias="use_conv_bias",
    expand="expand",
    input_bias="use_bias",
    output_bias="use_bias",
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=None,
        has_feed_forward=False,
        norm_eps=("layer_norm_epsilon", 1e-5),
        block=BlockTraits(names=nemotron_h.NAMES),
        max_model_len=file.integer("max_position_embeddings", _MAX_LEN),
    )
    config = read_decoder(file, traits)
    return replace(config, layers=(LayerTraits(read_mamba2(file, _FIELDS), None),) * config.num_layers)
