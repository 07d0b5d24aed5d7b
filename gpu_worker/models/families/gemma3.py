"""Gemma 3 (text): Gemma 2 with normalised heads instead of bounds; windows have a rotation of their own.

EmbeddingGemma is its layers alone, with attention in both directions.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, NormKind
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, map_attention, read_activation, read_decoder
from gpu_worker.models.families import gemma2
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows
from gpu_worker.models.rope_config import has_ropes_by_type, read_rope

ARCHITECTURE = "Gemma3ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    sees_later = file.boolean("use_bidirectional_attention", False)
    if sees_later and not any(name.endswith("Model") for name in file.texts("architectures")):
        problem = "is true; supported of layers alone (Gemma3TextModel), which make vectors, as EmbeddingGemma does"
        raise file.error("use_bidirectional_attention", problem)
    block = BlockTraits(
        norm=NormKind(is_offset=True),
        names=gemma2.NAMES,
        embedding_scale=file.integer("hidden_size") ** 0.5,
        logit_soft_cap=gemma2.read_soft_cap(file, "final_logit_softcapping", None),
    )
    attention = AttentionShape(scale=file.number("query_pre_attn_scalar", 256) ** -0.5, head_norm=HeadNorm.HEADS)
    attention = replace(attention, sees_later=sees_later)
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=256,
        attention=attention,
        layer_windows=_windows(file, sees_later),
        block=block,
        activation=read_activation(file, "hidden_activation", "gelu_pytorch_tanh"),
        is_tied=True,
        rope=_full_rope(file),
        max_model_len=file.integer("max_position_embeddings", 131072),
    )
    config = replace(read_decoder(file, traits), more_ropes=(_sliding_rope(file),))
    return map_attention(config, lambda shape: replace(shape, rotary=0 if shape.sliding_window is None else 1))


def _windows(file: JsonFile, sees_later: bool) -> tuple[int | None, ...]:
    """Read the windows, which have half of `sliding_window` on either side of a token that sees later ones."""
    windows = read_windows(file, all_but_every(file.integer("sliding_window_pattern", 6)))
    return tuple(window // 2 + 1 if window and sees_later else window for window in windows)


def _full_rope(file: JsonFile) -> RopeParameters:
    if has_ropes_by_type(file):
        return read_rope(file, "full_attention")
    rope = read_rope(file)
    return rope if "rope_theta" in file.names() else replace(rope, theta=1e6)


def _sliding_rope(file: JsonFile) -> RopeParameters:
    if has_ropes_by_type(file):
        return read_rope(file, "sliding_attention")
    length = file.integer("max_position_embeddings", 131072)
    return RopeParameters(RopeType.DEFAULT, file.number("rope_local_base_freq", 10_000.0), length)
