"""What Qwen's hybrid families have in common: attention with a gate, and normalisations that store weights less one."""

from __future__ import annotations

from gpu_worker.layers.layer_traits import AttentionShape, HeadNorm
from gpu_worker.models.block_traits import BlockTraits, NormKind
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rope_config import read_rotary_dim

HYBRID_TYPES = ("linear_attention", "full_attention")
_PARTIAL = "partial_rotary_factor"


def read_gated_attention_decoder(file: JsonFile, architecture: str) -> ModelConfig:
    """Read the configuration, with attention in all layers.

    Raises:
        CheckpointError: A field is missing, of the wrong type, or not supported.
    """
    head_dim = file.integer("head_dim", 256, minimum=4, maximum=1024)
    has_bias = file.boolean("attention_bias", False)
    attention = AttentionShape(
        rotary_dim=_rotary_dim(file, head_dim),
        head_norm=HeadNorm.HEADS,
        qkv_bias=has_bias,
        output_bias=has_bias,
        output_gate=True,
    )
    block = BlockTraits(norm=NormKind(is_offset=True))
    return read_decoder(file, FamilyTraits(architecture, head_dim=256, attention=attention, block=block))


def _rotary_dim(file: JsonFile, head_dim: int) -> int | None:
    """Read how many dimensions of a head turn: a quarter where nothing is said."""
    rope = file.nested("rope_parameters") or file.nested("rope_scaling")
    if _PARTIAL in file.names() or (rope is not None and _PARTIAL in rope.names()):
        return read_rotary_dim(file, head_dim)
    return read_rotary_dim(JsonFile(file.path, {**file.fields, _PARTIAL: 0.25}), head_dim)
