"""Mixtral: experts in every layer, two of eight for a token."""

from __future__ import annotations

from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_uniform_windows
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "MixtralForCausalLM"

NAMES = MixtureNames(
    router=("block_sparse_moe.gate", "mlp.gate"),
    experts=("block_sparse_moe.experts", "mlp.experts"),
    matrices=("w1", "w3", "w2"),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. The weights of a token's experts add up to one."""
    num_experts = read_num_experts(file, "num_local_experts")
    shape = MixtureShape(
        num_experts,
        file.integer("intermediate_size"),
        RoutingRule(read_top_k(file, num_experts, 2), renormalize=True),
        NAMES,
    )
    traits = FamilyTraits(ARCHITECTURE, layer_windows=read_uniform_windows(file), rope_theta=1e6)
    config = read_decoder(file, traits)
    return with_silu_mixtures(file, config, shape, all_layers(file))
