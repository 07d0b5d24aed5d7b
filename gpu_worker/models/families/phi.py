"""Phi 1, 1.5 and 2: parallel blocks behind one LayerNorm, heads that turn in part, and biases everywhere."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "PhiForCausalLM"

_NAMES = TensorNames(
    before_feed_forward=None,
    output="dense",
    up="fc1",
    down="fc2",
    renamed=((r"^model\.final_layernorm\.", "model.norm."),),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    if file.boolean("qk_layernorm", False):
        raise file.error("qk_layernorm", "is true; supported: false, as in all published checkpoints")
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=True, output_bias=True),
        is_gated=False,
        mlp_bias=True,
        block=BlockTraits(
            norm=NormKind(is_centered=True, has_bias=True), names=_NAMES, is_parallel=True, has_head_bias=True
        ),
        activation=read_activation(file, default="gelu_new"),
        norm_eps=("layer_norm_eps", 1e-5),
        rotary_share=0.5,
    )
    return read_decoder(file, traits)
