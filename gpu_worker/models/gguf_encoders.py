"""What a GGUF file's metadata say about an encoder, in the fields of its family's `config.json`.

Those of BERT's kind have learned positions; tokens of ModernBERT, Nomic Embed, Jina Embeddings v3 and EuroBERT turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families.bert import read_encoder
from gpu_worker.models.gguf_fields import DTYPES, MAX_HEADS, Fields, GGUFFamily, ModelFields
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import FULL, SLIDING
from gpu_worker.quantization.gguf.model_facts import ModelFacts
from gpu_worker.quantization.gguf.special_tokens import token_id

# Of ModernBERT: the first layer of each group of this size has no window.
_FULL_PERIOD = 3
# By the kind of the vocabulary: the architecture has one name.
_FAMILIES: Mapping[str, str] = {"bert": "BertModel", "t5": "XLMRobertaModel", "gpt2": "RobertaModel"}
_HEAD = {"cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias"}


def read_gguf_encoder(gguf: ModelFields, facts: ModelFacts) -> ModelConfig:
    """Read an encoder's configuration. Converters leave out the positions that stand for padding."""
    metadata = gguf.file.metadata
    architecture = _FAMILIES.get(metadata.text("tokenizer.ggml.model"), _FAMILIES["gpt2"])
    head = {name for name in gguf.tensors if name.startswith("cls.")}
    if head and (head != _HEAD or architecture == _FAMILIES["bert"]):
        problem = "are not of a whole head: converters leave out a layer of BERT's; serve the model's safetensors"
        raise gguf.tensor_error(f"tensors {', '.join(sorted(head))}", problem)
    missing = "is missing; encoders are served with learned positions"
    positions, segments = (_rows(gguf, f"{name}.weight", missing) for name in ("position_embd", "token_types"))
    fields = {
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.hidden_size,
        "intermediate_size": gguf.integer("feed_forward_length"),
        "num_hidden_layers": gguf.num_layers,
        "num_attention_heads": gguf.integer("attention.head_count", maximum=MAX_HEADS),
        "max_position_embeddings": positions,
        "type_vocab_size": segments,
        "layer_norm_eps": gguf.number("attention.layer_norm_epsilon"),
        "dtype": DTYPES.get(gguf.tensors["token_embd.weight"].type, "bfloat16"),
    }
    config = read_encoder(JsonFile(gguf.file.path / "metadata", fields), skips_padding=False)
    assert config.encoder is not None
    separator = token_id(metadata, "seperator") if segments > 1 else None
    encoder = replace(config.encoder, separator=separator)
    return replace(config, architecture=architecture, encoder=encoder, num_classes=facts.num_classes)


def _rows(gguf: ModelFields, name: str, missing: str) -> int:
    info = gguf.tensors.get(name)
    if info is None:
        raise gguf.tensor_error(f"tensor {name!r}", missing)
    return info.shape[0] if len(info.shape) > 1 else 1


def _fields(gguf: ModelFields, theta: float) -> Fields:
    """Read what all have; `theta` is the rotation's base where the file names none."""
    head = sorted(name for name in gguf.tensors if name.startswith("cls."))
    if head:
        problem = "are of a head that scores; files of this architecture make vectors: serve the model's safetensors"
        raise gguf.tensor_error(f"tensors {', '.join(head)}", problem)
    return {
        "intermediate_size": gguf.integer("feed_forward_length"),
        "attention_bias": gguf.has_qkv_bias,
        "mlp_bias": "ffn_up.bias" in gguf.parts,
        "rope_theta": gguf.number("rope.freq_base", theta),
    }


def _post_norm_fields(gguf: ModelFields, theta: float) -> Fields:
    rows = _rows(gguf, "token_types.weight", "is missing; files of this architecture have it")
    return {**_fields(gguf, theta), "layer_norm_eps": gguf.eps, "type_vocab_size": rows}


def _eurobert_fields(gguf: ModelFields) -> Fields:
    fields, key_heads = _fields(gguf, 10_000.0), "attention.head_count_kv"
    if key_heads in gguf:
        fields["num_key_value_heads"] = gguf.integer(key_heads, maximum=MAX_HEADS)
    return fields


def _modern_fields(gguf: ModelFields) -> Fields:
    """Read ModernBERT; its file names a window as wide as that to both sides together."""
    fields = _fields(gguf, 160_000.0)
    width = gguf.integer("attention.sliding_window", 0, minimum=0)
    slides = _slides(gguf) if width else [False] * gguf.num_layers
    return {
        **fields,
        "norm_eps": gguf.eps,
        "norm_bias": "output_norm.bias" in gguf.tensors,
        "hidden_activation": gguf.text("hidden_activation", "gelu"),
        "local_attention": width or None,
        "layer_types": [SLIDING if slid else FULL for slid in slides],
        "global_rope_theta": fields["rope_theta"],
        "local_rope_theta": gguf.number("rope.freq_base_swa", 10_000.0),
    }


def _slides(gguf: ModelFields) -> list[bool]:
    """Read which layers have the window: the file may name a period, or say it of each layer."""
    field = "attention.sliding_window_pattern"
    if isinstance(gguf.fields.get(field), list | np.ndarray):
        return [bool(flag) for flag in gguf.by_layer(field)]
    period = gguf.integer(field, _FULL_PERIOD)
    return [layer % period != 0 for layer in range(gguf.num_layers)]


ROTARY_ENCODERS: Mapping[str, GGUFFamily] = {
    "modern-bert": GGUFFamily(_modern_fields),
    "nomic-bert": GGUFFamily(lambda gguf: _post_norm_fields(gguf, 1000.0)),
    "jina-bert-v3": GGUFFamily(lambda gguf: _post_norm_fields(gguf, 20_000.0)),
    "eurobert": GGUFFamily(_eurobert_fields),
}
"""Files of these architectures."""
