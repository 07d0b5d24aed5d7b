"""Ai2's OLMo 2 and 3, OLMoE and FlexOlmo."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, read_decoder, with_window_rope
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows
from gpu_worker.models.mixture_config import all_layers, read_mixture, with_silu_mixtures
from gpu_worker.models.rope_config import has_ropes_by_type, read_rope

NAMES = TensorNames(
    before_mixer=None,
    after_mixer="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)


def read_olmo2(file: JsonFile) -> ModelConfig:
    """Read OLMo 2: normalisations after the blocks instead of before, and of all queries and keys as one vector."""
    return read_decoder(file, olmo_traits(file))


def olmo_traits(file: JsonFile) -> FamilyTraits:
    """Return the traits that OLMo 2 and 3 share."""
    attention = biased(file, AttentionShape(head_norm=HeadNorm.WHOLE))
    eps = ("rms_norm_eps", 1e-5)
    return FamilyTraits(attention=attention, block=BlockTraits(names=NAMES), norm_eps=eps)


_THETA = 500_000.0


def read_olmo3(file: JsonFile) -> ModelConfig:
    """Read OLMo 3: OLMo 2 with a window in three layers of four, whose rotation is not scaled."""
    by_type = has_ropes_by_type(file)
    full = read_rope(file, "full_attention" if by_type else None, default_theta=_THETA)
    sliding = read_rope(file, "sliding_attention", default_theta=_THETA) if by_type else _unscaled(full, file)
    traits = replace(
        olmo_traits(file),
        layer_windows=read_windows(file, all_but_every(4)),
        rope=full,
        max_model_len=file.integer("max_position_embeddings"),
    )
    return with_window_rope(read_decoder(file, traits), sliding)


def _unscaled(rope: RopeParameters, file: JsonFile) -> RopeParameters:
    return RopeParameters(RopeType.DEFAULT, rope.theta, file.integer("max_position_embeddings"))


_COUNTS = ("num_experts", "num_local_experts")


def read_olmoe(file: JsonFile) -> ModelConfig:
    """Read OLMoE: many small experts, and queries and keys normalised over all heads at once."""
    shape = read_mixture(file, _COUNTS, 8, renormalize=file.boolean("norm_topk_prob", False))
    traits = FamilyTraits(
        attention=biased(file, AttentionShape(head_norm=HeadNorm.WHOLE, qkv_clip=file.optional_number("clip_qkv"))),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))


def read_flex_olmo(file: JsonFile) -> ModelConfig:
    """Read FlexOlmo: OLMo 2's layers with experts in place of its feed-forward blocks."""
    shape = read_mixture(file, _COUNTS, 5, renormalize=file.boolean("norm_topk_prob", False))
    traits = replace(olmo_traits(file), norm_eps=("rms_norm_eps", 1e-6), rope_theta=500_000.0)
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))


FAMILIES = (
    Family("Olmo2ForCausalLM", read_olmo2),
    Family("Olmo3ForCausalLM", read_olmo3),
    Family("OlmoeForCausalLM", read_olmoe),
    Family("FlexOlmoForCausalLM", read_flex_olmo),
)
