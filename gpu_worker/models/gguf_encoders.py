"""What a GGUF file's metadata say about an encoder, in the fields of its family's `config.json`.

Those of BERT's kind have learned positions; tokens of ModernBERT, Nomic Embed, Jina Embeddings v3 and EuroBERT turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families.bert import read_encoder
from gpu_worker.models.gguf_fields import (
    DTYPES,
    MAX_HEADS,
    Fields,
    GGUFFamily,
    by_layer,
    has_qkv_bias,
    layer_parts,
    num_layers,
    read_eps,
)
from gpu_worker.models.json_file import JsonFile
from gpu_worker.quantization.gguf.encoder_names import ENCODER
from gpu_worker.quantization.gguf.errors import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.model_facts import ModelFacts
from gpu_worker.quantization.gguf.special_tokens import token_id

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Of ModernBERT, one layer of so many has no window, the first one among them.
_FULL_PERIOD = 3
# By the kind of the vocabulary: the architecture has one name.
_FAMILIES: Mapping[str, str] = MappingProxyType({"bert": "BertModel", "t5": "XLMRobertaModel", "gpt2": "RobertaModel"})
_HEAD = {"cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias"}


def read_gguf_encoder(file: GGUFFile, facts: ModelFacts) -> ModelConfig:
    """Read an encoder's configuration. Converters leave out the positions that stand for padding.

    Raises:
        HeadraceError: A field or tensor is missing, malformed or not supported.
    """
    metadata = file.metadata
    architecture = _FAMILIES.get(metadata.text("tokenizer.ggml.model"), _FAMILIES["gpt2"])
    head = {name for name in file.tensors if name.startswith("cls.")}
    if head and (head != _HEAD or architecture == _FAMILIES["bert"]):
        problem = "are not of a whole head: converters leave out a layer of BERT's; serve the model's safetensors"
        raise GGUFError(file.path, f"tensors {', '.join(sorted(head))}", problem)
    positions, segments = (_rows(file, f"{name}.weight") for name in ("position_embd", "token_types"))
    fields = {
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.hidden_size,
        "intermediate_size": metadata.integer(f"{ENCODER}.feed_forward_length"),
        "num_hidden_layers": num_layers(file, ENCODER),
        "num_attention_heads": metadata.integer(f"{ENCODER}.attention.head_count", maximum=1024),
        "max_position_embeddings": positions,
        "type_vocab_size": segments,
        "layer_norm_eps": metadata.number(f"{ENCODER}.attention.layer_norm_epsilon"),
        "dtype": DTYPES.get(file.tensors["token_embd.weight"].type, "bfloat16"),
    }
    config = read_encoder(JsonFile(file.path / "metadata", fields), architecture, skips_padding=False)
    assert config.encoder is not None
    separator = token_id(metadata, "seperator") if segments > 1 else None
    encoder = replace(config.encoder, separator=separator)
    return replace(config, encoder=encoder, num_classes=facts.num_classes)


def _rows(file: GGUFFile, name: str) -> int:
    info = file.tensors.get(name)
    if info is None:
        raise GGUFError(file.path, f"tensor {name!r}", "is missing; encoders are served with learned positions")
    return info.shape[0] if len(info.shape) > 1 else 1


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


ROTARY_ENCODERS: Mapping[str, GGUFFamily] = MappingProxyType(
    {
        "modern-bert": GGUFFamily(_modern_fields),
        "nomic-bert": GGUFFamily(lambda file, prefix: _post_norm_fields(file, prefix, 1000.0)),
        "jina-bert-v3": GGUFFamily(lambda file, prefix: _post_norm_fields(file, prefix, 20_000.0)),
        "eurobert": GGUFFamily(_eurobert_fields),
    }
)
"""Files of these architectures."""
