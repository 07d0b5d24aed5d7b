"""What a GGUF file's metadata say about its model, in the form that all families share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from gpu_worker.layers.block_traits import BlockTraits
from gpu_worker.layers.gated_mlp import GatedShape
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.plain_mlp import PlainShape
from gpu_worker.layers.rope_scaling import RopeParameters
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_encoder import read_gguf_encoder
from gpu_worker.models.gguf_family import GGUFFamily, gguf_family
from gpu_worker.models.gguf_latent import LATENT, read_gguf_latent, read_latent_rotary_dim
from gpu_worker.models.gguf_layers import (
    num_layers,
    read_attention,
    read_eps,
    read_head_dim,
    read_kv_heads,
    read_layers,
    read_rotary_dim,
    read_window_ropes,
)
from gpu_worker.models.gguf_mixture import mixture_layers, read_gguf_mixture
from gpu_worker.models.gguf_rope import reached_len, read_gguf_rope
from gpu_worker.models.gguf_translated import is_translated, read_translated
from gpu_worker.models.mixture_config import with_mixtures
from gpu_worker.quantization.gguf.encoder_names import ENCODER
from gpu_worker.quantization.gguf.errors import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.method import read_gguf_method
from gpu_worker.quantization.gguf.model_facts import ARCHITECTURES, ModelFacts, model_facts
from gpu_worker.quantization.gguf.special_tokens import end_token_ids, token_id
from gpu_worker.quantization.gguf.tensor_types import F16, F32

# Quantized weights come from bfloat16 models nearly always; what they compute may be too large for float16.
_MIXTRAL = "MixtralForCausalLM"
_DTYPES = {F32: torch.float32, F16: torch.float16}


def read_gguf_config(path: Path) -> ModelConfig:
    """Read a file's configuration, without its weights.

    Raises:
        GGUFError: The file is malformed, or its model is not supported.
    """
    with GGUFFile(path) as file:
        facts = model_facts(file)
        if facts.architecture == ENCODER:
            return read_gguf_encoder(file, facts)
        if is_translated(facts.architecture):
            return read_translated(file, facts)
        config = _read_latent(file, facts) if facts.architecture == LATENT else _read(file, facts)
        mixture = read_gguf_mixture(file, facts.architecture, config.intermediate_size)
        if mixture is None:
            return config
        architecture = _MIXTRAL if facts.architecture == "llama" else config.architecture
        return with_mixtures(replace(config, architecture=architecture), mixture, mixture_layers(file))


def _read(file: GGUFFile, facts: ModelFacts) -> ModelConfig:
    metadata, prefix = file.metadata, facts.architecture
    family = gguf_family(prefix)
    num_heads = metadata.integer(f"{prefix}.attention.head_count", maximum=1024)
    num_kv_heads = read_kv_heads(file, prefix, num_heads)
    if not metadata.boolean(f"{prefix}.rope.scaling.finetuned", True) and prefix in ("granite", "granitemoe"):
        raise metadata.error(f"{prefix}.rope.scaling.finetuned", "is false; supported: Granite whose layers rotate")
    head_dim = read_head_dim(file, prefix, metadata.integer(f"{prefix}.embedding_length"), num_heads)
    rotary_dim = read_rotary_dim(file, prefix, family, head_dim)
    rope = read_gguf_rope(file, prefix, rotary_dim, facts.context_length)
    attention = read_attention(file, prefix, family, (num_heads, num_kv_heads, head_dim), rotary_dim)
    feed_forward = (GatedShape if family.is_gated else PlainShape)(
        metadata.integer(f"{prefix}.feed_forward_length"), family.activation, "blk.0.ffn_up.bias" in file.tensors
    )
    layers = read_layers(file, prefix, family, attention, feed_forward)
    config = _config(file, facts, rope, layers, (num_heads, num_kv_heads, head_dim))
    return replace(config, more_ropes=read_window_ropes(file, prefix, family, rope, layers))


def _read_latent(file: GGUFFile, facts: ModelFacts) -> ModelConfig:
    metadata, prefix = file.metadata, facts.architecture
    num_heads = metadata.integer(f"{prefix}.attention.head_count", maximum=1024)
    rope = read_gguf_rope(file, prefix, read_latent_rotary_dim(file), facts.context_length)
    shape = read_gguf_latent(file, num_heads, rope)
    layer = LayerTraits(shape, GatedShape(metadata.integer(f"{prefix}.feed_forward_length")))
    return _config(file, facts, rope, (layer,) * num_layers(file, prefix), (num_heads, 1, shape.key_dim))


def _config(
    file: GGUFFile,
    facts: ModelFacts,
    rope: RopeParameters,
    layers: tuple[LayerTraits, ...],
    sizes: tuple[int, int, int],
) -> ModelConfig:
    """Put a configuration together; `sizes` are query heads, key heads, and a head's size."""
    metadata, prefix = file.metadata, facts.architecture
    family = gguf_family(prefix)
    dense = file.tensors.get("blk.0.attn_output.weight")
    return ModelConfig(
        architecture=ARCHITECTURES[prefix],
        vocab_size=facts.vocab_size,
        hidden_size=metadata.integer(f"{prefix}.embedding_length"),
        intermediate_size=metadata.integer(f"{prefix}.feed_forward_length"),
        num_layers=len(layers),
        num_heads=sizes[0],
        num_kv_heads=sizes[1],
        head_dim=sizes[2],
        rms_norm_eps=read_eps(file, prefix),
        rope=rope,
        max_model_len=_max_model_len(file, prefix, rope, facts.context_length),
        layers=layers,
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_ids=end_token_ids(metadata),
        bos_token_id=token_id(metadata, "bos"),
        dtype=torch.bfloat16 if dense is None else _DTYPES.get(dense.type, torch.bfloat16),
        block=_read_block(file, prefix, family),
        quantization=read_gguf_method(file),
    )


def _read_block(file: GGUFFile, prefix: str, family: GGUFFamily) -> BlockTraits:
    """Read how layers are put together, and the factors around them."""
    metadata, cap = file.metadata, f"{prefix}.final_logit_softcapping"
    scale = metadata.integer(f"{prefix}.embedding_length") ** 0.5 if family.scales_embeddings else 1.0
    logits = metadata.number(f"{prefix}.logit_scale", 1.0)
    names, is_parallel = family.names, family.is_parallel
    if "blk.0.attn_qkv.weight" in file.tensors:
        names = replace(names, qkv=("qkv_proj",))
    if is_parallel is None and "blk.0.ffn_norm.weight" not in file.tensors:
        names, is_parallel = replace(names, before_feed_forward=None), True
    return BlockTraits(
        norm=family.norm,
        names=names,
        is_parallel=is_parallel is not False and (is_parallel or _says_parallel(file, prefix)),
        has_head_bias="output.bias" in file.tensors,
        residual_scale=metadata.number(f"{prefix}.residual_scale", 1.0),
        embedding_scale=metadata.number(f"{prefix}.embedding_scale", scale),
        logit_scale=1 / logits if family.divides_logits else logits,
        logit_soft_cap=metadata.number(cap) if cap in metadata else None,
    )


def _says_parallel(file: GGUFFile, prefix: str) -> bool:
    # Of StableLM, converters guess it where the checkpoint did not say it.
    return prefix != "stablelm" and file.metadata.boolean(f"{prefix}.use_parallel_residual", True)


def _max_model_len(file: GGUFFile, prefix: str, rope: RopeParameters, context_length: int) -> int:
    try:
        return reached_len(rope, context_length)
    except ValueError as error:
        raise GGUFError(file.path, f"field '{prefix}.rope.scaling.factor'", str(error)) from None
