"""Google's Gemma 1 to 3 (text), VaultGemma and EmbeddingGemma."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder, with_window_rope
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import FULL, SLIDING, all_but_every, read_windows
from gpu_worker.models.rope_config import has_ropes_by_type, read_rope
from kernels.activation import Activation


def read_gemma(file: JsonFile) -> ModelConfig:
    """Read Gemma: GELU whatever the file says, scaled embeddings, and norm weights stored less one."""
    block = BlockTraits(norm=NormKind(is_offset=True), embedding_scale=file.integer("hidden_size") ** 0.5)
    traits = FamilyTraits(head_dim=256, block=block, activation=Activation.GELU_TANH, is_tied=True)
    return read_decoder(file, traits)


NAMES = TensorNames(
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)


def read_gemma2(file: JsonFile) -> ModelConfig:
    """Read Gemma 2: normalisations before and after each block, bounded scores, and a window in every other layer."""
    return read_decoder(file, gemma2_traits(file, NAMES))


def gemma2_traits(file: JsonFile, names: TensorNames) -> FamilyTraits:
    """Return the traits that Gemma 2 and VaultGemma share."""
    file.require("use_bidirectional_attention", False, "attention to earlier tokens only")
    block = BlockTraits(
        norm=NormKind(is_offset=True),
        names=names,
        embedding_scale=file.integer("hidden_size") ** 0.5,
        logit_soft_cap=read_soft_cap(file, "final_logit_softcapping", 30.0),
    )
    attention = AttentionShape(
        scale=file.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=read_soft_cap(file, "attn_logit_softcapping", 50.0),
    )
    return FamilyTraits(
        head_dim=256,
        attention=attention,
        layer_windows=read_windows(file, all_but_every(2)),
        block=block,
        activation=read_activation(file, "hidden_activation", "gelu_pytorch_tanh"),
        is_tied=True,
    )


def read_soft_cap(file: JsonFile, name: str, default: float | None) -> float | None:
    """Read a bound of scores; null is none."""
    if file.is_null(name) or (default is None and name not in file.names()):
        return None
    return file.number(name, default)


def read_vaultgemma(file: JsonFile) -> ModelConfig:
    """Read VaultGemma: Gemma 2 without normalisations behind the blocks."""
    names = TensorNames(before_feed_forward="pre_feedforward_layernorm")
    return read_decoder(file, gemma2_traits(file, names))


def read_gemma3(file: JsonFile) -> ModelConfig:
    """Read Gemma 3 (text): Gemma 2 with normalised heads instead of bounds; windows have a rotation of their own.

    EmbeddingGemma is its layers alone, with attention in both directions.
    """
    sees_later = file.boolean("use_bidirectional_attention", False)
    if sees_later and not any(name.endswith("Model") for name in file.texts("architectures")):
        problem = "is true; supported of layers alone (Gemma3TextModel), which make vectors, as EmbeddingGemma does"
        raise file.error("use_bidirectional_attention", problem)
    block = BlockTraits(
        norm=NormKind(is_offset=True),
        names=NAMES,
        embedding_scale=file.integer("hidden_size") ** 0.5,
        logit_soft_cap=read_soft_cap(file, "final_logit_softcapping", None),
    )
    attention = AttentionShape(scale=file.number("query_pre_attn_scalar", 256) ** -0.5, head_norm=HeadNorm.HEADS)
    traits = FamilyTraits(
        head_dim=256,
        attention=replace(attention, sees_later=sees_later),
        layer_windows=_windows(file, sees_later),
        block=block,
        activation=read_activation(file, "hidden_activation", "gelu_pytorch_tanh"),
        is_tied=True,
        rope=read_rope(file, FULL, default_theta=1e6),
        max_model_len=file.integer("max_position_embeddings", 131072),
    )
    return with_window_rope(read_decoder(file, traits), _sliding_rope(file))


def _windows(file: JsonFile, sees_later: bool) -> tuple[int | None, ...]:
    """Read the windows, which have half of `sliding_window` on either side of a token that sees later ones."""
    windows = read_windows(file, all_but_every(file.integer("sliding_window_pattern", 6)))
    return tuple(window // 2 + 1 if window and sees_later else window for window in windows)


def _sliding_rope(file: JsonFile) -> RopeParameters:
    if has_ropes_by_type(file):
        return read_rope(file, SLIDING)
    length = file.integer("max_position_embeddings", 131072)
    return RopeParameters(RopeType.DEFAULT, file.number("rope_local_base_freq", 10_000.0), length)


FAMILIES = (
    Family("GemmaForCausalLM", read_gemma, defaults={"num_key_value_heads": 16}),
    Family("Gemma2ForCausalLM", read_gemma2, defaults={"num_key_value_heads": 4}),
    Family("VaultGemmaForCausalLM", read_vaultgemma, defaults={"num_key_value_heads": 4}),
    Family("Gemma3ForCausalLM", read_gemma3, defaults={"num_key_value_heads": 4}),
)
