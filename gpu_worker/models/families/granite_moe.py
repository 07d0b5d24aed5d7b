"""Granite-MoE (and PowerMoE): Granite's multipliers around experts that are stored as one tensor."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "GraniteMoeForCausalLM"

_BLOCK = "block_sparse_moe"
NAMES = MixtureNames(
    router=(f"{_BLOCK}.router.layer", f"{_BLOCK}.router"),
    experts=(f"{_BLOCK}.experts",),
    stacked=(
        (f"{_BLOCK}.input_linear", f"{_BLOCK}.output_linear"),
        (f"{_BLOCK}.experts.gate_up_proj", f"{_BLOCK}.experts.down_proj"),
    ),
    shared="shared_mlp",
    shared_matrices=("input_linear", "output_linear"),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return read_granite_moe(file, ARCHITECTURE, shared_size=0)


def read_granite_moe(file: JsonFile, architecture: str, shared_size: int) -> ModelConfig:
    """Read the configuration of a model with an expert of `shared_size` that all tokens get, or without one."""
    bias = file.boolean("attention_bias", False)
    num_experts = read_num_experts(file, "num_local_experts")
    shape = MixtureShape(
        num_experts,
        file.integer("intermediate_size"),
        RoutingRule(read_top_k(file, num_experts, 2), score="softmax_after_topk"),
        NAMES,
        shared_size=shared_size,
    )
    traits = FamilyTraits(
        architecture,
        attention=AttentionShape(scale=file.number("attention_multiplier", 1.0), qkv_bias=bias, output_bias=bias),
        block=BlockTraits(
            residual_scale=file.number("residual_multiplier", 1.0),
            embedding_scale=file.number("embedding_multiplier", 1.0),
            logit_scale=1 / file.number("logits_scaling", 1.0),
        ),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))
