"""Granite 4: Mamba-2 in most layers, attention in the others, with experts and one of all tokens, or that one alone."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.models.config import ModelConfig, map_attention, read_decoder
from gpu_worker.models.families.granite import granite_traits
from gpu_worker.models.families.granite_moe import read_granite_moe
from gpu_worker.models.hybrid_config import with_mixers
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_layer_types
from gpu_worker.models.mamba2_config import read_mamba2

ARCHITECTURE = "GraniteMoeHybridForCausalLM"
SAMPLE = {"mamba_n_heads": 8, "mamba_d_state": 64, "layer_types": ["mamba"] * 7 + ["attention"]}

_RECURRENT = ("mamba", "linear_attention")
_KINDS = (*_RECURRENT, "attention", "full_attention")
# Where there are no experts, the expert of all tokens is the layer's block.
_DENSE_NAMES = TensorNames(gate_up=("input_linear",), down="output_linear", renamed=((r"\.shared_mlp\.", ".mlp."),))


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    config = _read_blocks(file, file.integer("shared_intermediate_size", 1024))
    if file.fields.get("position_embedding_type") != "rope":
        config = map_attention(config, lambda shape: replace(shape, rotary=None))
    name = "layer_types" if "layer_types" in file.names() else "layers_block_type"
    types = read_layer_types(file, _KINDS, lambda layer: _RECURRENT[0], name)
    if set(types).isdisjoint(_RECURRENT):
        return config
    return with_mixers(config, types, dict.fromkeys(_RECURRENT, read_mamba2(file)))


def _read_blocks(file: JsonFile, shared_size: int) -> ModelConfig:
    if file.integer("num_local_experts", 8, minimum=0) > 0:
        return read_granite_moe(file, ARCHITECTURE, shared_size)
    config = read_decoder(file, replace(granite_traits(file, ARCHITECTURE), inner_size=shared_size))
    return replace(config, block=replace(config.block, names=_DENSE_NAMES))
