"""What a GGUF file's metadata say about its model, in the form that all families share."""

from __future__ import annotations

from pathlib import Path

import torch

from gpu_worker.layers.layer_traits import AttentionShape, GatedShape, HeadNorm
from gpu_worker.layers.rope_scaling import RopeParameters
from gpu_worker.models.config import ModelConfig, windowed
from gpu_worker.models.gguf_mixture import mixture_layers, read_gguf_mixture
from gpu_worker.models.gguf_rope import reached_len, read_gguf_rope
from gpu_worker.models.mixture_config import with_mixtures
from gpu_worker.quantization.gguf.errors import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.method import read_gguf_method
from gpu_worker.quantization.gguf.model_facts import ARCHITECTURES, model_facts
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
        return _read(file)


def _read(file: GGUFFile) -> ModelConfig:
    metadata, facts = file.metadata, model_facts(file)
    prefix = facts.architecture
    num_layers = metadata.integer(f"{prefix}.block_count", maximum=1024)
    num_heads = metadata.integer(f"{prefix}.attention.head_count", maximum=1024)
    num_kv_heads = metadata.integer(f"{prefix}.attention.head_count_kv", num_heads, maximum=1024)
    if num_heads % num_kv_heads:
        problem = f"is {num_kv_heads}; it must divide {prefix}.attention.head_count ({num_heads})"
        raise metadata.error(f"{prefix}.attention.head_count_kv", problem)
    hidden_size = metadata.integer(f"{prefix}.embedding_length")
    head_dim = _head_dim(file, prefix, hidden_size, num_heads)
    rope = read_gguf_rope(file, prefix, head_dim, facts.context_length)
    first = file.tensors.get("blk.0.attn_q.weight")
    inner_size = metadata.integer(f"{prefix}.feed_forward_length")
    feed_forward = GatedShape(inner_size, has_bias="blk.0.ffn_up.bias" in file.tensors)
    attention = _attention(file, num_heads, num_kv_heads, head_dim)
    mixture = read_gguf_mixture(file, prefix, inner_size)
    config = ModelConfig(
        architecture=_MIXTRAL if prefix == "llama" and mixture is not None else ARCHITECTURES[prefix],
        vocab_size=facts.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=inner_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        rope=rope,
        max_model_len=_max_model_len(file, prefix, rope, facts.context_length),
        layers=windowed(attention, feed_forward, _windows(file, prefix, num_layers)),
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_ids=end_token_ids(metadata),
        bos_token_id=token_id(metadata, "bos"),
        dtype=torch.bfloat16 if first is None else _DTYPES.get(first.type, torch.bfloat16),
        quantization=read_gguf_method(file),
    )
    return config if mixture is None else with_mixtures(config, mixture, mixture_layers(file))


def _attention(file: GGUFFile, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
    norm = file.tensors.get("blk.0.attn_q_norm.weight")
    whole = HeadNorm.WHOLE if norm is not None and norm.shape != (head_dim,) else HeadNorm.HEADS
    return AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        head_norm=HeadNorm.NONE if norm is None else whole,
        has_sinks="blk.0.attn_sinks.weight" in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
    )


def _head_dim(file: GGUFFile, prefix: str, hidden_size: int, num_heads: int) -> int:
    metadata, field = file.metadata, f"{prefix}.attention.key_length"
    if field not in metadata and hidden_size % num_heads:
        problem = f"is {hidden_size}; it must be a multiple of {prefix}.attention.head_count ({num_heads})"
        raise metadata.error(f"{prefix}.embedding_length", problem)
    head_dim = metadata.integer(field, max(1, hidden_size // num_heads), minimum=4, maximum=1024)
    if head_dim % 2:
        raise metadata.error(field, f"is {head_dim}; rotary embeddings need an even number")
    for other in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
        if metadata.integer(other, head_dim) != head_dim:
            raise metadata.error(other, f"is {metadata.integer(other)}; supported: the size of a key, {head_dim}")
    return head_dim


def _windows(file: GGUFFile, prefix: str, num_layers: int) -> tuple[int | None, ...]:
    """Read the sliding windows: Llama's (Mistral) is one of all layers, gpt-oss' one of every other layer."""
    field = f"{prefix}.attention.sliding_window"
    if field not in file.metadata:
        return (None,) * num_layers
    if prefix not in ("llama", "gpt-oss"):
        raise file.metadata.error(field, "is set; supported: in files of architecture llama and gpt-oss")
    window = file.metadata.integer(field)
    return tuple(None if prefix == "gpt-oss" and layer % 2 else window for layer in range(num_layers))


def _max_model_len(file: GGUFFile, prefix: str, rope: RopeParameters, context_length: int) -> int:
    try:
        return reached_len(rope, context_length)
    except ValueError as error:
        raise GGUFError(file.path, f"field '{prefix}.rope.scaling.factor'", str(error)) from None
