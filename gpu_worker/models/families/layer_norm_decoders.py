"""Decoders with LayerNorm: GPT-2, GPT-NeoX, Jais 2, Nemotron (dense), OPT, StableLM 2 and StarCoder2."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, NormKind, PositionTable, TensorNames
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, read_activation, read_decoder
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_uniform_windows

_NORM = NormKind(is_centered=True, has_bias=True)

# Fields that have other names in most families.
_FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
_GPT2_NAMES = TensorNames(
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


def read_gpt2(file: JsonFile) -> ModelConfig:
    """Read GPT-2: learned positions, LayerNorm, biases throughout, and transposed matrices."""
    file.require("scale_attn_weights", True, "scores over the square root of heads' size")
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        file.require(name, False)
    hidden_size, length = (
        file.integer("n_embd"),
        file.integer("n_positions", file.integer("max_position_embeddings", 1024)),
    )
    renamed = {ours: file.fields.get(theirs) for theirs, ours in _FIELDS.items()}
    file = JsonFile(file.path, {**file.fields, **renamed, "head_dim": None, "max_position_embeddings": length})
    traits = FamilyTraits(
        shares_kv_heads=False,
        attention=AttentionShape(qkv_bias=True, output_bias=True, rotary=None),
        is_gated=False,
        mlp_bias=True,
        block=BlockTraits(norm=_NORM, names=_GPT2_NAMES, positions=PositionTable(length)),
        activation=read_activation(file, "activation_function", "gelu_new"),
        inner_size=file.integer("n_inner", 4 * hidden_size),
        norm_eps=("layer_norm_epsilon", 1e-5),
        is_tied=True,
        # No layer turns by it.
        rope=RopeParameters(RopeType.DEFAULT, 1e4, length),
        max_model_len=length,
    )
    return read_decoder(file, traits)


_GPT_NEOX_NAMES = TensorNames(
    qkv=("query_key_value",),
    renamed=(
        (r"^gpt_neox\.", "model."),
        (r"^model\.embed_in\.", "model.embed_tokens."),
        (r"^embed_out\.", "lm_head."),
        (r"^model\.final_layer_norm\.", "model.norm."),
        (r"\.attention\.", ".self_attn."),
        (r"\.dense\.", ".o_proj."),
        (r"\.dense_h_to_4h\.", ".up_proj."),
        (r"\.dense_4h_to_h\.", ".down_proj."),
    ),
    # Masks and frequencies, which old checkpoints hold.
    unused=(r".*\.self_attn\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)


def read_gpt_neox(file: JsonFile) -> ModelConfig:
    """Read GPT-NeoX, Pythia and their like: parallel blocks with a LayerNorm each, matrices that go by heads."""
    traits = FamilyTraits(
        shares_kv_heads=False,
        attention=biased(file, AttentionShape(by_head=True), default=True),
        is_gated=False,
        mlp_bias=True,
        block=BlockTraits(norm=_NORM, names=_GPT_NEOX_NAMES, is_parallel=file.boolean("use_parallel_residual", True)),
        activation=read_activation(file, default="gelu"),
        norm_eps=("layer_norm_eps", 1e-5),
        # Older checkpoints have names of their own for both.
        rotary_share=file.number("rotary_pct", 0.25),
        rope_theta=file.number("rotary_emb_base", 10000.0),
    )
    return read_decoder(file, traits)


def read_jais2(file: JsonFile) -> ModelConfig:
    """Read Jais 2: LayerNorm, squared ReLU without a gate, and biases throughout."""
    traits = FamilyTraits(
        attention=biased(file, default=True),
        is_gated=False,
        mlp_bias=file.boolean("mlp_bias", True),
        block=BlockTraits(norm=_NORM),
        activation=read_activation(file, default="relu2"),
        norm_eps=("layer_norm_eps", 1e-5),
    )
    return read_decoder(file, traits)


def read_nemotron(file: JsonFile) -> ModelConfig:
    """Read Nemotron and Minitron (dense): LayerNorm stored less one, heads that turn in part, squared ReLU."""
    traits = FamilyTraits(
        attention=biased(file),
        is_gated=False,
        mlp_bias=file.boolean("mlp_bias", False),
        block=BlockTraits(norm=NormKind(is_centered=True, has_bias=True, is_offset=True)),
        activation=read_activation(file, default="relu2"),
        norm_eps=("norm_eps", 1e-5),
        rotary_share=0.5,
    )
    return read_decoder(file, traits)


# Rows of positions before that of the first token.
_FIRST_ROW = 2
_OPT_NAMES = TensorNames(
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


def read_opt(file: JsonFile) -> ModelConfig:
    """Read OPT: learned positions, LayerNorm before blocks, ReLU, biases throughout."""
    file.require("do_layer_norm_before", True, "normalisation before blocks")
    file.require("layer_norm_elementwise_affine", True, "normalisation with weights")
    file.require("_remove_final_layer_norm", False)
    hidden_size, length = file.integer("hidden_size"), file.integer("max_position_embeddings", 2048)
    if (size := file.integer("word_embed_proj_dim", hidden_size)) != hidden_size:
        raise file.error("word_embed_proj_dim", f"is {size}; it must be hidden_size ({hidden_size})")
    bias = file.boolean("enable_bias", True)
    traits = FamilyTraits(
        shares_kv_heads=False,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias, rotary=None),
        is_gated=False,
        mlp_bias=bias,
        block=BlockTraits(norm=_NORM, names=_OPT_NAMES, positions=PositionTable(length, _FIRST_ROW)),
        activation=read_activation(file, "activation_function", "relu"),
        inner_size=file.integer("ffn_dim", 4 * hidden_size),
        norm_eps=("layer_norm_eps", 1e-5),
        is_tied=True,
        # No layer turns by it.
        rope=RopeParameters(RopeType.DEFAULT, 1e4, length),
        max_model_len=length,
    )
    return read_decoder(file, traits)


def read_stablelm(file: JsonFile) -> ModelConfig:
    """Read StableLM 2: heads that turn in part; in the 12B model, parallel blocks and normalised heads."""
    is_parallel = file.boolean("use_parallel_residual", False)
    names = TensorNames(renamed=((r"\.([qk])_layernorm\.norms\.", r".\1_norm."),))
    if is_parallel:
        names = replace(names, before_feed_forward=None)
    traits = FamilyTraits(
        attention=AttentionShape(
            qkv_bias=file.boolean("use_qkv_bias", False),
            head_norm=HeadNorm.APART if file.boolean("qk_layernorm", False) else HeadNorm.NONE,
        ),
        block=BlockTraits(norm=_NORM, names=names, is_parallel=is_parallel),
        norm_eps=("layer_norm_eps", 1e-5),
        rotary_share=0.25,
    )
    return read_decoder(file, traits)


def read_starcoder2(file: JsonFile) -> ModelConfig:
    """Read StarCoder2: LayerNorm, biases throughout, and a feed-forward block without a gate."""
    traits = FamilyTraits(
        attention=biased(file, field="use_bias", default=True),
        layer_windows=read_uniform_windows(file),
        is_gated=False,
        mlp_bias=file.boolean("use_bias", True),
        block=BlockTraits(norm=_NORM, names=TensorNames(up="c_fc", down="c_proj")),
        activation=read_activation(file, default="gelu_pytorch_tanh"),
        norm_eps=("norm_epsilon", 1e-5),
        is_tied=True,
    )
    return read_decoder(file, traits)


FAMILIES = (
    Family("GPT2LMHeadModel", read_gpt2, {"n_embd": 256, "n_head": 8, "n_layer": 8, "n_positions": 1024}),
    Family("GPTNeoXForCausalLM", read_gpt_neox),
    Family("Jais2ForCausalLM", read_jais2),
    Family("NemotronForCausalLM", read_nemotron),
    Family("OPTForCausalLM", read_opt, defaults={"ffn_dim": 3072}),
    Family("StableLmForCausalLM", read_stablelm, defaults={"num_key_value_heads": 32}),
    Family("Starcoder2ForCausalLM", read_starcoder2, defaults={"num_key_value_heads": 2}),
)
