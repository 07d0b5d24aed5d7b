"""Gemma 2: normalisations before and after each block, bounded scores, and a window in every other layer."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows

ARCHITECTURE = "Gemma2ForCausalLM"

NAMES = TensorNames(
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_decoder(file, gemma2_traits(file, ARCHITECTURE, NAMES))


def gemma2_traits(file: JsonFile, architecture: str, names: TensorNames) -> FamilyTraits:
    """Return what Gemma 2 and VaultGemma have in common.

    Raises:
        CheckpointError: Tokens attend to later ones.
    """
    if file.boolean("use_bidirectional_attention", False):
        raise file.error("use_bidirectional_attention", "is true; supported: attention to earlier tokens only")
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
        architecture,
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
