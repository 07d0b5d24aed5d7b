"""Apertus: normalised heads, and a block without a gate whose function (xIELU) each layer has learned."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile
from kernels.activation import Activation

ARCHITECTURE = "ApertusForCausalLM"

_NAMES = TensorNames(before_mixer="attention_layernorm", before_feed_forward="feedforward_layernorm")
_LEARNED = "xielu"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = file.boolean("attention_bias", False)
    is_learned = file.text("hidden_act", _LEARNED) == _LEARNED
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias, head_norm=HeadNorm.HEADS),
        is_gated=False,
        block=BlockTraits(names=_NAMES),
        activation=Activation.XIELU if is_learned else read_activation(file),
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=12_000_000.0,
    )
    return read_decoder(file, traits)
