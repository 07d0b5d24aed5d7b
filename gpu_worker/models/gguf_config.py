"""What a GGUF file's metadata say about its model, in the form that all families share.

Metadata are read as the fields of the `config.json` of the checkpoint, which the family's own reader reads: llama.cpp's
converters write the same facts under other names. What they change in a model besides is put over the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families import find_families
from gpu_worker.models.gguf_decoders import decoder_fields, finish_decoder
from gpu_worker.models.gguf_encoders import ROTARY_ENCODERS, read_gguf_encoder
from gpu_worker.models.gguf_fields import DTYPES, MAX_HEADS, Fields, GGUFFamily, ModelFields
from gpu_worker.models.gguf_mamba import MAMBA_FAMILIES
from gpu_worker.models.gguf_mixture import SPARSE_FAMILIES
from gpu_worker.models.gguf_own import OWN_FAMILIES
from gpu_worker.models.json_file import JsonFile
from gpu_worker.quantization.gguf.checkpoint import read_gguf_method
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.model_facts import ARCHITECTURES, ModelFacts, model_facts
from gpu_worker.quantization.gguf.special_tokens import end_token_ids, token_id
from gpu_worker.quantization.gguf.tensor_names import ENCODER, tensors_by_name

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
        # The converter was told to put them together.
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
