"""What a GGUF file's metadata say about its model, in the form that all families share.

Metadata are read as the fields of the `config.json` of the checkpoint, which the family's own reader reads: llama.cpp's
converters write the same facts under other names. What they change in a model besides is put over the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families import find_families
from gpu_worker.models.families.bert import read_encoder
from gpu_worker.models.gguf_decoders import decoder_fields, finish_decoder
from gpu_worker.models.gguf_fields import DTYPES, MAX_HEADS, Fields, GGUFFamily, ModelFields
from gpu_worker.models.gguf_mamba import MAMBA_FAMILIES
from gpu_worker.models.gguf_mixture import SPARSE_FAMILIES
from gpu_worker.models.gguf_own import OWN_FAMILIES
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import FULL, SLIDING
from gpu_worker.quantization.gguf.checkpoint import read_gguf_method
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.metadata import end_token_ids, token_id
from gpu_worker.quantization.gguf.model_facts import ARCHITECTURES, ModelFacts, model_facts
from gpu_worker.quantization.gguf.tensor_names import ENCODER, tensors_by_name

# Of ModernBERT: the first layer of each group of this size has no window.
_FULL_PERIOD = 3
# By the kind of the vocabulary: the architecture has one name.
_ENCODER_NAMES: Mapping[str, str] = {"bert": "BertModel", "t5": "XLMRobertaModel", "gpt2": "RobertaModel"}
_HEAD = {"cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias"}


def read_gguf_encoder(gguf: ModelFields, facts: ModelFacts) -> ModelConfig:
    """Read an encoder's configuration. Converters leave out the positions that stand for padding."""
    metadata = gguf.file.metadata
    architecture = _ENCODER_NAMES.get(metadata.text("tokenizer.ggml.model"), _ENCODER_NAMES["gpt2"])
    head = {name for name in gguf.tensors if name.startswith("cls.")}
    if head and (head != _HEAD or architecture == _ENCODER_NAMES["bert"]):
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


def _rotary_fields(gguf: ModelFields, theta: float) -> Fields:
    """Read the fields that all rotary encoders have; `theta` is the default of the rotation's base."""
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
    return {**_rotary_fields(gguf, theta), "layer_norm_eps": gguf.eps, "type_vocab_size": rows}


def _eurobert_fields(gguf: ModelFields) -> Fields:
    fields, key_heads = _rotary_fields(gguf, 10_000.0), "attention.head_count_kv"
    if key_heads in gguf:
        fields["num_key_value_heads"] = gguf.integer(key_heads, maximum=MAX_HEADS)
    return fields


def _modern_bert_fields(gguf: ModelFields) -> Fields:
    """Read ModernBERT; its file names a window as wide as that to both sides together."""
    fields = _rotary_fields(gguf, 160_000.0)
    width = gguf.integer("attention.sliding_window", 0, minimum=0)
    windowed = _windowed_layers(gguf) if width else [False] * gguf.num_layers
    return {
        **fields,
        "norm_eps": gguf.eps,
        "norm_bias": "output_norm.bias" in gguf.tensors,
        "hidden_activation": gguf.text("hidden_activation", "gelu"),
        "local_attention": width or None,
        "layer_types": [SLIDING if is_windowed else FULL for is_windowed in windowed],
        "global_rope_theta": fields["rope_theta"],
        "local_rope_theta": gguf.number("rope.freq_base_swa", 10_000.0),
    }


def _windowed_layers(gguf: ModelFields) -> list[bool]:
    """Return whether each layer has the window: the file names a period, or lists the layers."""
    field = "attention.sliding_window_pattern"
    if isinstance(gguf.fields.get(field), list | np.ndarray):
        return [bool(flag) for flag in gguf.by_layer(field)]
    period = gguf.integer(field, _FULL_PERIOD)
    return [layer % period != 0 for layer in range(gguf.num_layers)]


ROTARY_ENCODERS: Mapping[str, GGUFFamily] = {
    "modern-bert": GGUFFamily(_modern_bert_fields),
    "nomic-bert": GGUFFamily(lambda gguf: _post_norm_fields(gguf, 1000.0)),
    "jina-bert-v3": GGUFFamily(lambda gguf: _post_norm_fields(gguf, 20_000.0)),
    "eurobert": GGUFFamily(_eurobert_fields),
}
"""Files of these architectures."""


_PLAIN = GGUFFamily(decoder_fields, finish_decoder)
# All others are plain.
_FAMILIES: Mapping[str, GGUFFamily] = {**OWN_FAMILIES, **MAMBA_FAMILIES, **SPARSE_FAMILIES, **ROTARY_ENCODERS}


def read_gguf_config(path: Path) -> ModelConfig:
    """Read a file's configuration, without its weights. Raises `GGUFError` or `CheckpointError`."""
    with GGUFFile(path) as file:
        facts = model_facts(file)
        gguf = ModelFields(file, facts.architecture)
        return read_gguf_encoder(gguf, facts) if facts.architecture == ENCODER else _read(gguf, facts)


def _read(gguf: ModelFields, facts: ModelFacts) -> ModelConfig:
    file, family = gguf.file, _FAMILIES.get(gguf.prefix, _PLAIN)
    fields = {**_shared_fields(gguf, facts), **family.fields(gguf)}
    read_config = find_families()[fields["architectures"][0]]
    # As if the file were a folder: no other file's fields count.
    config = family.finish(gguf, read_config(JsonFile(file.path / "metadata", fields)))
    if any(name.endswith(".self_attn.qkv_proj.weight") for name in tensors_by_name(file)):
        # The converter was run with the option that merges them.
        config = replace(config, block=replace(config.block, names=replace(config.block.names, qkv=("qkv_proj",))))
    return replace(config, quantization=read_gguf_method(file), draft_head=None)


def _shared_fields(gguf: ModelFields, facts: ModelFacts) -> Fields:
    metadata = gguf.file.metadata
    return {
        "architectures": [ARCHITECTURES[gguf.prefix]],
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.hidden_size,
        "num_hidden_layers": gguf.num_layers,
        # Files of models without attention say 0, which no family's reader takes for a number of heads.
        "num_attention_heads": gguf.integer("attention.head_count", minimum=0, maximum=MAX_HEADS),
        "rms_norm_eps": gguf.eps,
        "max_position_embeddings": facts.context_length,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "eos_token_id": sorted(end_token_ids(metadata)),
        "bos_token_id": token_id(metadata, "bos"),
        "dtype": DTYPES.get(gguf.tensors["token_embd.weight"].type, "bfloat16"),
    }
