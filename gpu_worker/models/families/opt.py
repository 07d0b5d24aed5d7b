"""OPT: learned positions, LayerNorm, ReLU, biases throughout."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, NormKind, PositionTable, TensorNames
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "OPTForCausalLM"
SAMPLE = {"ffn_dim": 512}

# Rows of positions before that of the first token.
_FIRST_ROW = 2
_NAMES = TensorNames(
    before_mixer="self_attn_layer_norm",
    before_feed_forward="final_layer_norm",
    output="out_proj",
    up="fc1",
    down="fc2",
    renamed=(
        (r"^(model\.)?decoder\.", "model."),
        (r"^model\.final_layer_norm\.", "model.norm."),
        (r"\.(fc[12])\.", r".mlp.\1."),
    ),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration.

    Raises:
        CheckpointError: The model is built as the 350M one: normalised behind blocks, with embeddings of another size.
    """
    if not file.boolean("do_layer_norm_before", True):
        raise file.error("do_layer_norm_before", "is false; supported: true, normalisation before blocks")
    if not file.boolean("layer_norm_elementwise_affine", True):
        raise file.error("layer_norm_elementwise_affine", "is false; supported: true, normalisation with weights")
    if file.boolean("_remove_final_layer_norm", False):
        raise file.error("_remove_final_layer_norm", "is true; supported: false")
    hidden_size, length = file.integer("hidden_size"), file.integer("max_position_embeddings", 2048)
    if (size := file.integer("word_embed_proj_dim", hidden_size)) != hidden_size:
        raise file.error("word_embed_proj_dim", f"is {size}; it must be hidden_size ({hidden_size})")
    bias = file.boolean("enable_bias", True)
    traits = FamilyTraits(
        ARCHITECTURE,
        shares_kv_heads=False,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias, rotary=None),
        is_gated=False,
        mlp_bias=bias,
        block=BlockTraits(
            norm=NormKind(is_centered=True, has_bias=True), names=_NAMES, positions=PositionTable(length, _FIRST_ROW)
        ),
        activation=read_activation(file, "activation_function", "relu"),
        inner_size=file.integer("ffn_dim", 4 * hidden_size),
        norm_eps=("layer_norm_eps", 1e-5),
        is_tied=True,
        # No layer turns by it.
        rope=RopeParameters(RopeType.DEFAULT, 1e4, length),
        max_model_len=length,
    )
    return read_decoder(file, traits)
