"""Reads what checkpoints' configurations say about attention by latent vectors."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.rope_scaling import score_scale
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rope_config import read_query_growth

# What the kernels of attention take: a row of the cache, and the part of it that values are.
MAX_KEY_DIM, MAX_LATENT_DIM = 576, 512


def read_latent_decoder(file: JsonFile, traits: FamilyTraits, *, is_interleaved: bool) -> ModelConfig:
    """Read a decoder whose layers attend by latent vectors.

    Raises:
        CheckpointError: A field is missing, of the wrong type, or not supported.
    """
    rotary_dim = file.integer("qk_rope_head_dim", maximum=MAX_KEY_DIM)
    config = read_decoder(file, replace(traits, head_dim=rotary_dim))
    plain_dim = file.integer("qk_nope_head_dim", maximum=MAX_KEY_DIM)
    assert config.rope is not None, "families with latent attention rotate"
    has_rank = "q_lora_rank" in file.names() and not file.is_null("q_lora_rank")
    shape = LatentShape(
        num_heads=config.num_heads,
        query_rank=file.integer("q_lora_rank") if has_rank else None,
        latent_dim=file.integer("kv_lora_rank"),
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=file.integer("v_head_dim", maximum=MAX_LATENT_DIM),
        scale=(plain_dim + rotary_dim) ** -0.5 * score_scale(config.rope),
        interleaved=is_interleaved,
        has_bias=file.boolean("attention_bias", False),
        query_growth=read_query_growth(file),
    )
    _check(file, shape)
    layers = tuple(replace(layer, mixer=shape) for layer in config.layers)
    return replace(config, layers=layers, num_kv_heads=1, head_dim=shape.key_dim)


def _check(file: JsonFile, shape: LatentShape) -> None:
    if shape.rotary_dim % 2:
        raise file.error("qk_rope_head_dim", f"is {shape.rotary_dim}; rotary embeddings need an even number")
    if shape.latent_dim > MAX_LATENT_DIM:
        raise file.error("kv_lora_rank", f"is {shape.latent_dim}; attention takes up to {MAX_LATENT_DIM}")
    if shape.key_dim > MAX_KEY_DIM:
        problem = f"and kv_lora_rank are {shape.key_dim} together; attention takes up to {MAX_KEY_DIM}"
        raise file.error("qk_rope_head_dim", problem)
