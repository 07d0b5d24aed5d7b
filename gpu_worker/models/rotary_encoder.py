"""What encoders have in common whose tokens turn, instead of having learned positions."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, EmbeddingTraits, NormKind, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

# Before the names in a checkpoint of layers alone, and in one with a head.
_ROOT = r"^(?:[a-z_]+\.)??"
_CLASSES = "ForSequenceClassification"

POST_NORM_NAMES = TensorNames(
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
"""Of the families that normalise the stream behind each block."""


def read_rotary_encoder(file: JsonFile, traits: FamilyTraits, *, scores_classes: bool = False) -> ModelConfig:
    """Read an encoder, which has no head for the vocabulary.

    Args:
        file: The configuration.
        traits: Of the family; tokens see later ones whatever it says.
        scores_classes: A head that scores classes is served.

    Raises:
        CheckpointError: A field is missing, of the wrong type, or not supported.
    """
    named = next((name for name in file.texts("architectures") if name.endswith(_CLASSES)), None)
    if named is not None and not scores_classes:
        problem = f"is {named[:80]!r}; supported of this family: {traits.architecture}, which makes vectors"
        raise file.error("architectures", problem)
    traits = replace(traits, attention=replace(traits.attention or AttentionShape(), sees_later=True))
    return replace(read_decoder(file, traits), tie_word_embeddings=True)


def post_norm_block(names: TensorNames, num_segments: int) -> BlockTraits:
    """Return how layers are put together that normalise the stream behind each block, with so many segments."""
    return BlockTraits(
        norm=NormKind(is_centered=True, has_bias=True),
        names=names,
        is_post_norm=True,
        has_final_norm=False,
        embeddings=EmbeddingTraits(num_segments),
    )
