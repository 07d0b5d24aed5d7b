"""StarCoder2: LayerNorm, biases throughout, and a feed-forward block without a gate."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_uniform_windows

ARCHITECTURE = "Starcoder2ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = file.boolean("use_bias", True)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias),
        layer_windows=read_uniform_windows(file),
        is_gated=False,
        mlp_bias=bias,
        block=BlockTraits(norm=NormKind(is_centered=True, has_bias=True), names=TensorNames(up="c_fc", down="c_proj")),
        activation=read_activation(file, default="gelu_pytorch_tanh"),
        norm_eps=("norm_epsilon", 1e-5),
        is_tied=True,
    )
    return read_decoder(file, traits)
