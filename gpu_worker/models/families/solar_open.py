"""Solar Open: Llama's attention, and GLM's routing and shared expert in every layer."""

from __future__ import annotations

from gpu_worker.layers.layer_traits import AttentionShape
from gpu_worker.layers.mixture_shape import MixtureNames, MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, grouped_sigmoid_rule, read_num_experts, with_silu_mixtures

ARCHITECTURE = "SolarOpenForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    num_experts = read_num_experts(file, "n_routed_experts", "num_local_experts")
    inner_size = file.integer("moe_intermediate_size", 1280)
    shape = MixtureShape(
        num_experts,
        inner_size,
        grouped_sigmoid_rule(file, num_experts),
        MixtureNames(shared="mlp.shared_experts"),
        has_choice_bias=True,
        shared_size=inner_size * file.integer("n_shared_experts", 1, minimum=0),
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(qkv_bias=file.boolean("attention_bias", False)),
        inner_size=inner_size,
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))
