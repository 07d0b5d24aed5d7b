"""ModernBERT: gates, rotation, and windows in all but every third layer. It generates nothing."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, EmbeddingTraits, NormKind, TensorNames
from gpu_worker.layers.rope_scaling import RopeParameters
from gpu_worker.models.config import FamilyTraits, ModelConfig, map_attention, read_activation
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_layer_types
from gpu_worker.models.rope_config import has_ropes_by_type, read_rope
from gpu_worker.models.rotary_encoder import read_rotary_encoder

ARCHITECTURE = "ModernBertModel"

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NAMES = TensorNames(
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


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration.

    Raises:
        CheckpointError: The head of classes has another function than GELU.
    """
    if (kind := file.text("classifier_activation", "gelu")) != "gelu":
        raise file.error("classifier_activation", f"is {kind[:80]!r}; supported: 'gelu'")
    bias, length = file.boolean("attention_bias", False), file.integer("max_position_embeddings", 8192)
    full, sliding = _rope(file, _FULL, "global_rope_theta", 160_000.0), _rope(file, _SLIDING, "local_rope_theta", 1e4)
    traits = FamilyTraits(
        ARCHITECTURE,
        shares_kv_heads=False,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias),
        layer_windows=_windows(file),
        mlp_bias=file.boolean("mlp_bias", False),
        block=BlockTraits(
            norm=NormKind(is_centered=True, has_bias=file.boolean("norm_bias", False)),
            names=_NAMES,
            first_is_bare=True,
            embeddings=EmbeddingTraits(),
        ),
        activation=read_activation(file, "hidden_activation", "gelu"),
        norm_eps=("norm_eps", 1e-5),
        rope=full,
        max_model_len=length,
    )
    config = replace(read_rotary_encoder(file, traits, scores_classes=True), more_ropes=(sliding,))
    return map_attention(config, lambda shape: replace(shape, rotary=0 if shape.sliding_window is None else 1))


def _windows(file: JsonFile) -> tuple[int | None, ...]:
    """Read the windows, which have half of `local_attention` on either side of a token."""
    every = file.integer("global_attn_every_n_layers", 3)
    types = read_layer_types(file, (_FULL, _SLIDING), lambda layer: _SLIDING if layer % every else _FULL)
    window = file.integer("local_attention", 128) // 2 + 1
    return tuple(window if kind == _SLIDING else None for kind in types)


def _rope(file: JsonFile, kind: str, field: str, theta: float) -> RopeParameters:
    """Read the rotation of a kind of layers, whose base published configurations have in a field of its own."""
    if not has_ropes_by_type(file):
        file = JsonFile(file.path, {**file.fields, "rope_theta": file.fields.get(field)})
    return read_rope(file, kind, default_theta=theta)
