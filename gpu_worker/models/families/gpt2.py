"""GPT-2: learned positions, LayerNorm, biases throughout, and matrices that are stored turned round."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, NormKind, PositionTable, TensorNames
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "GPT2LMHeadModel"
SAMPLE = {"n_embd": 256, "n_head": 8, "n_layer": 8, "n_positions": 1024}

# Fields that have other names in most families.
_FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
_NAMES = TensorNames(
    before_mixer="ln_1",
    before_feed_forward="ln_2",
    qkv=("c_attn",),
    output="c_proj",
    up="c_fc",
    down="c_proj",
    is_transposed=True,
    renamed=(
        (r"^(transformer\.)?h\.", "model.layers."),
        (r"^(transformer\.)?wte\.", "model.embed_tokens."),
        (r"^(transformer\.)?wpe\.", "model.embed_positions."),
        (r"^(transformer\.)?ln_f\.", "model.norm."),
        (r"\.attn\.", ".self_attn."),
    ),
    # Masks, which old checkpoints hold.
    unused=(r".*\.self_attn\.(bias|masked_bias)",),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration.

    Raises:
        CheckpointError: Scores have a scale of each layer, or none.
    """
    if not file.boolean("scale_attn_weights", True):
        raise file.error("scale_attn_weights", "is false; supported: true, scores over the square root of heads' size")
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if file.boolean(name, False):
            raise file.error(name, "is true; supported: false")
    hidden_size, length = file.integer("n_embd"), file.integer("n_positions", 1024)
    renamed = {ours: file.fields.get(theirs) for theirs, ours in _FIELDS.items()}
    file = JsonFile(file.path, {**file.fields, **renamed, "head_dim": None, "max_position_embeddings": length})
    traits = FamilyTraits(
        ARCHITECTURE,
        shares_kv_heads=False,
        attention=AttentionShape(qkv_bias=True, output_bias=True, rotary=None),
        is_gated=False,
        mlp_bias=True,
        block=BlockTraits(
            norm=NormKind(is_centered=True, has_bias=True), names=_NAMES, positions=PositionTable(length)
        ),
        activation=read_activation(file, "activation_function", "gelu_new"),
        inner_size=file.integer("n_inner", 4 * hidden_size),
        norm_eps=("layer_norm_epsilon", 1e-5),
        is_tied=True,
        # No layer turns by it.
        rope=RopeParameters(RopeType.DEFAULT, 1e4, length),
        max_model_len=length,
    )
    return read_decoder(file, traits)
