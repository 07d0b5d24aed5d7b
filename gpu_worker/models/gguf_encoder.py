"""What a GGUF file's metadata say about an encoder, in the fields of its family's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.encoder_config import read_encoder
from gpu_worker.models.gguf_layers import num_layers
from gpu_worker.models.json_file import JsonFile
from gpu_worker.quantization.gguf.encoder_names import ENCODER
from gpu_worker.quantization.gguf.errors import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.model_facts import ModelFacts
from gpu_worker.quantization.gguf.special_tokens import token_id
from gpu_worker.quantization.gguf.tensor_types import F16, F32

_DTYPES = {F32: "float32", F16: "float16"}
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
        "dtype": _DTYPES.get(file.tensors["token_embd.weight"].type, "bfloat16"),
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
