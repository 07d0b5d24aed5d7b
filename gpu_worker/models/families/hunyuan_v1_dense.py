"""Hunyuan (dense): heads that are normalised behind the rotation, whose base a constant may stretch."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rope_config import max_model_len, read_rope, rope_fields

ARCHITECTURE = "HunYuanDenseV1ForCausalLM"

# Published models have 1000.
_MAX_ALPHA = 1e6
_NAMES = TensorNames(renamed=((r"\.query_layernorm\.", ".q_norm."), (r"\.key_layernorm\.", ".k_norm.")))


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_decoder(file, hunyuan_traits(file, ARCHITECTURE))


def hunyuan_traits(file: JsonFile, architecture: str) -> FamilyTraits:
    """Return what Hunyuan's first models have in common."""
    bias = file.boolean("attention_bias", False)
    rope = _read_rope(file)
    return FamilyTraits(
        architecture,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias, head_norm=HeadNorm.ROTATED),
        block=BlockTraits(names=_NAMES),
        norm_eps=("rms_norm_eps", 1e-5),
        rope=rope,
        max_model_len=max_model_len(file, rope),
    )


def _read_rope(file: JsonFile) -> RopeParameters:
    """Read the rotation: with `alpha`, what is called dynamic has a base that no length changes."""
    fields, rope = rope_fields(file), read_rope(file)
    if rope.rope_type is not RopeType.DYNAMIC or "alpha" not in fields.names():
        # The normalisation behind the rotation undoes what that multiplies by.
        return replace(rope, attention_factor=1.0)
    heads = file.integer("num_attention_heads", maximum=1024)
    dim = file.integer("head_dim", max(4, file.integer("hidden_size") // heads), minimum=4, maximum=1024)
    alpha = fields.number("alpha")
    if alpha > _MAX_ALPHA:
        raise fields.error("alpha", f"is {alpha:g}; it must be at most {_MAX_ALPHA:g}")
    theta = rope.theta * alpha ** (dim / (dim - 2))
    return RopeParameters(RopeType.DEFAULT, theta, rope.original_max_len)
