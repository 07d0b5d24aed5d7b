"""Bamba: Mamba-2 in most layers, attention whose heads turn by half in the others."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.hybrid_config import with_mixers
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mamba2_config import read_mamba2

ARCHITECTURE = "BambaForCausalLM"
SAMPLE = {"mamba_n_heads": 8, "mamba_d_state": 64, "attn_layer_indices": [2]}

_NAMES = TensorNames(
    before_feed_forward="pre_ff_layernorm",
    renamed=((r"\.feed_forward\.", ".mlp."), (r"^model\.final_layernorm\.", "model.norm.")),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    has_bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=has_bias, output_bias=has_bias),
        mlp_bias=file.boolean("mlp_bias", False),
        norm_eps=("rms_norm_eps", 1e-5),
        rotary_share=0.5,
        block=BlockTraits(names=_NAMES),
    )
    config, attending = read_decoder(file, traits), file.integers("attn_layer_indices")
    types = tuple("attention" if layer in attending else "mamba" for layer in range(config.num_layers))
    return with_mixers(config, types, {"mamba": read_mamba2(file)})
