"""What GGUF metadata say about encoders whose tokens turn: ModernBERT, Nomic Embed, Jina Embeddings v3, EuroBERT."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from gpu_worker.models.families import eurobert, jina_embeddings_v3, modernbert, nomic_bert
from gpu_worker.models.gguf_fields import MAX_HEADS, Fields, TranslatedFamily, by_layer, has_qkv_bias, layer_parts
from gpu_worker.models.gguf_layers import num_layers, read_eps
from gpu_worker.quantization.gguf.errors import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Of ModernBERT, one layer of so many has no window, the first one among them.
_FULL_PERIOD = 3


def _fields(file: GGUFFile, prefix: str, theta: float) -> Fields:
    """Read what all have; `theta` is the rotation's base where the file names none."""
    head = sorted(name for name in file.tensors if name.startswith("cls."))
    if head:
        problem = "are of a head that scores; files of this architecture make vectors: serve the model's safetensors"
        raise GGUFError(file.path, f"tensors {', '.join(head)}", problem)
    parts = layer_parts(file)
    return {
        "intermediate_size": file.metadata.integer(f"{prefix}.feed_forward_length"),
        "attention_bias": has_qkv_bias(parts),
        "mlp_bias": "ffn_up.bias" in parts,
        "rope_theta": file.metadata.number(f"{prefix}.rope.freq_base", theta),
    }


def _post_norm_fields(file: GGUFFile, prefix: str, theta: float) -> Fields:
    """Read encoders that normalise the stream behind each block."""
    segments = file.tensors.get("token_types.weight")
    if segments is None:
        raise GGUFError(file.path, "tensor 'token_types.weight'", "is missing; files of this architecture have it")
    rows = segments.shape[0] if len(segments.shape) > 1 else 1
    return {**_fields(file, prefix, theta), "layer_norm_eps": read_eps(file, prefix), "type_vocab_size": rows}


def _eurobert_fields(file: GGUFFile, prefix: str) -> Fields:
    fields, key_heads = _fields(file, prefix, 10_000.0), f"{prefix}.attention.head_count_kv"
    if key_heads in file.metadata:
        fields["num_key_value_heads"] = file.metadata.integer(key_heads, maximum=MAX_HEADS)
    return fields


def _modern_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read ModernBERT; its file names a window as wide as that to both sides together."""
    metadata, count, fields = file.metadata, num_layers(file, prefix), _fields(file, prefix, 160_000.0)
    width = metadata.integer(f"{prefix}.attention.sliding_window", 0, minimum=0)
    slides = _slides(file, prefix) if width else [False] * count
    return {
        **fields,
        "norm_eps": read_eps(file, prefix),
        "norm_bias": "output_norm.bias" in file.tensors,
        "hidden_activation": metadata.text(f"{prefix}.hidden_activation", "gelu"),
        "local_attention": width or None,
        "layer_types": [_SLIDING if slid else _FULL for slid in slides],
        "global_rope_theta": fields["rope_theta"],
        "local_rope_theta": metadata.number(f"{prefix}.rope.freq_base_swa", 10_000.0),
    }


def _slides(file: GGUFFile, prefix: str) -> list[bool]:
    """Read which layers have the window: the file may name a period, or say it of each layer."""
    field = f"{prefix}.attention.sliding_window_pattern"
    if isinstance(file.metadata.fields.get(field), list | np.ndarray):
        return [bool(flag) for flag in by_layer(file, field)]
    period = file.metadata.integer(field, _FULL_PERIOD)
    return [layer % period != 0 for layer in range(num_layers(file, prefix))]


ROTARY_ENCODERS: Mapping[str, TranslatedFamily] = MappingProxyType(
    {
        "modern-bert": TranslatedFamily(modernbert.read_config, _modern_fields),
        "nomic-bert": TranslatedFamily(
            nomic_bert.read_config, lambda file, prefix: _post_norm_fields(file, prefix, 1000.0)
        ),
        "jina-bert-v3": TranslatedFamily(
            jina_embeddings_v3.read_config, lambda file, prefix: _post_norm_fields(file, prefix, 20_000.0)
        ),
        "eurobert": TranslatedFamily(eurobert.read_config, _eurobert_fields),
    }
)
"""Files of these architectures."""
