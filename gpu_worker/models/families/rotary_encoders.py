"""Encoders whose tokens turn, instead of having learned positions. They generate nothing."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, EmbeddingTraits, NormKind, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, read_activation, read_decoder, with_window_rope
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import FULL, SLIDING, read_layer_types
from gpu_worker.models.rope_config import read_rope_of

# Before the names in a checkpoint of layers alone, and in one with a head.
_ROOT = r"^(?:[a-z_]+\.)??"
_CLASSES = "ForSequenceClassification"

# Of the families that normalise the stream behind each block.
_POST_NORM_NAMES = TensorNames(
    before_mixer=None,
    after_mixer="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_mlp_layernorm",
    qkv=("Wqkv",),
    renamed=(
        (rf"{_ROOT}embeddings\.word_embeddings\.", "model.embed_tokens."),
        (rf"{_ROOT}embeddings\.token_type_embeddings\.", "model.segments."),
        (rf"{_ROOT}(?:emb_ln|embeddings\.LayerNorm)\.", "model.embedding_norm."),
        (rf"{_ROOT}(?:encoder\.)?layers\.", "model.layers."),
        (r"\.(?:attn|mixer)\.", ".self_attn."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".post_mlp_layernorm."),
    ),
    # Of other uses of the checkpoint.
    unused=(r"(?:[a-z_]+\.)?pooler\..*", r"(?:cls|lm_head)\..*"),
)


def _read_rotary_encoder(file: JsonFile, traits: FamilyTraits, only_vectors: str | None = None) -> ModelConfig:
    """Read an encoder without a vocabulary head; of the class `only_vectors`, one that scores classes is not served."""
    named = next((name for name in file.texts("architectures") if name.endswith(_CLASSES)), None)
    if named is not None and only_vectors is not None:
        problem = f"is {named[:80]!r}; supported of this family: {only_vectors}, which makes vectors"
        raise file.error("architectures", problem)
    traits = replace(traits, attention=replace(traits.attention or AttentionShape(), sees_later=True))
    return replace(read_decoder(file, traits), tie_word_embeddings=True)


def _post_norm_block(names: TensorNames, num_segments: int) -> BlockTraits:
    return BlockTraits(
        norm=NormKind(is_centered=True, has_bias=True),
        names=names,
        is_post_norm=True,
        has_final_norm=False,
        embeddings=EmbeddingTraits(num_segments),
    )


_EUROBERT_NAMES = TensorNames(unused=(r"lm_head\..*",))


def read_eurobert(file: JsonFile) -> ModelConfig:
    """Read EuroBERT: Llama's layers with attention in both directions."""
    traits = FamilyTraits(
        attention=biased(file),
        mlp_bias=file.boolean("mlp_bias", False),
        block=BlockTraits(names=_EUROBERT_NAMES),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return _read_rotary_encoder(file, traits, "EuroBertModel")


_JINA_EMBEDDINGS_V3_NAMES = replace(_POST_NORM_NAMES, up="fc1", down="fc2")


def read_jina_embeddings_v3(file: JsonFile) -> ModelConfig:
    """Read Jina Embeddings v3: XLM-RoBERTa whose tokens turn. Its adapters for tasks are not part of the model."""
    traits = FamilyTraits(
        shares_kv_heads=False,
        attention=AttentionShape(qkv_bias=True, output_bias=True),
        is_gated=False,
        mlp_bias=True,
        block=_post_norm_block(_JINA_EMBEDDINGS_V3_NAMES, file.integer("type_vocab_size", 1)),
        activation=read_activation(file, default="gelu"),
        norm_eps=("layer_norm_eps", 1e-5),
        rope_theta=20_000.0,
    )
    return _read_rotary_encoder(file, traits, "JinaEmbeddingsV3Model")


# Fields of published configurations, by the names that most families have for them.
_FIELDS = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon", "max_position_embeddings": "n_positions",
    "rope_theta": "rotary_emb_base",
}  # fmt: skip
# Options of the published code that no dense checkpoint uses, and what they are there.
_ABSENT = ("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved", "causal")
_BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
_GATED = "swiglu"
_NOMIC_BERT_NAMES = replace(
    _POST_NORM_NAMES,
    renamed=(
        *_POST_NORM_NAMES.renamed,
        (r"\.mlp\.fc11\.", ".mlp.up_proj."),
        (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    ),
)


def read_nomic_bert(file: JsonFile) -> ModelConfig:
    """Read Nomic Embed (1 and 1.5), in published names or those of `transformers`: BERT's blocks, gated and rotated."""
    if "n_embd" in file.names():
        file = _translated(file)
    traits = FamilyTraits(
        shares_kv_heads=False,
        block=_post_norm_block(_NOMIC_BERT_NAMES, file.integer("type_vocab_size", 2)),
        norm_eps=("layer_norm_eps", 1e-12),
        rope_theta=1000.0,
    )
    return _read_rotary_encoder(file, traits, "NomicBertModel")


def _translated(file: JsonFile) -> JsonFile:
    """Return a published configuration in the names of `transformers`."""
    file.require("moe_every_n_layers", 0, "Nomic Embed without experts (1, 1.5)")
    for name in (*_ABSENT, *_BIASES):
        if file.boolean(name, name in _BIASES):
            raise file.error(name, "is true; supported: false")
    if (kind := file.text("activation_function", "gelu")) != _GATED:
        raise file.error("activation_function", f"is {kind[:80]!r}; supported: {_GATED!r}")
    if file.number("rotary_emb_fraction", 1.0) != 1:
        raise file.error("rotary_emb_fraction", "is not 1; supported: heads that turn whole")
    if "rotary_scaling_factor" in file.names():
        raise file.error("rotary_scaling_factor", "is set; supported: null, a rotation without scaling")
    ours = {name: file.fields.get(theirs) for name, theirs in _FIELDS.items()}
    return JsonFile(file.path, {**file.fields, **ours, "hidden_act": "silu"})


_MODERNBERT_NAMES = TensorNames(
    before_mixer="attn_norm",
    before_feed_forward="mlp_norm",
    qkv=("Wqkv",),
    output="Wo",
    gate_up=("Wi",),
    down="Wo",
    renamed=(
        (r"^(?:model\.)?embeddings\.tok_embeddings\.", "model.embed_tokens."),
        (r"^(?:model\.)?embeddings\.norm\.", "model.embedding_norm."),
        (r"^(?:model\.)?final_norm\.", "model.norm."),
        (r"^layers\.", "model.layers."),
        (r"\.attn\.", ".self_attn."),
    ),
    # Of the head that predicts masked words.
    unused=(r"decoder\..*",),
)


def read_modernbert(file: JsonFile) -> ModelConfig:
    """Read ModernBERT: gates, rotation, and windows in all but every third layer."""
    file.require("classifier_activation", "gelu")
    full, sliding = (
        read_rope_of(file, FULL, "global_rope_theta", 160_000.0),
        read_rope_of(file, SLIDING, "local_rope_theta", 1e4),
    )
    traits = FamilyTraits(
        shares_kv_heads=False,
        attention=biased(file),
        layer_windows=_windows(file),
        mlp_bias=file.boolean("mlp_bias", False),
        block=BlockTraits(
            norm=NormKind(is_centered=True, has_bias=file.boolean("norm_bias", False)),
            names=_MODERNBERT_NAMES,
            first_is_bare=True,
            embeddings=EmbeddingTraits(),
        ),
        activation=read_activation(file, "hidden_activation", "gelu"),
        norm_eps=("norm_eps", 1e-5),
        rope=full,
        max_model_len=file.integer("max_position_embeddings", 8192),
    )
    return with_window_rope(_read_rotary_encoder(file, traits), sliding)


def _windows(file: JsonFile) -> tuple[int | None, ...]:
    """Read the windows, which have half of `local_attention` on either side of a token."""
    every = file.integer("global_attn_every_n_layers", 3)
    types = read_layer_types(file, (FULL, SLIDING), lambda layer: SLIDING if layer % every else FULL)
    window = file.integer("local_attention", 128) // 2 + 1
    return tuple(window if kind == SLIDING else None for kind in types)


FAMILIES = (
    Family("EuroBertModel", read_eurobert),
    Family("JinaEmbeddingsV3Model", read_jina_embeddings_v3),
    Family("NomicBertModel", read_nomic_bert),
    Family("ModernBertModel", read_modernbert),
)
