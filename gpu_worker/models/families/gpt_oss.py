"""gpt-oss: sinks, sliding windows in every other layer, and experts of clamped numbers in MXFP4."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_mixtures
from kernels.activation.experts import clamped_swiglu
from kernels.moe import RoutingRule

ARCHITECTURE = "GptOssForCausalLM"

NAMES = MixtureNames(router=("mlp.router",), is_transposed=True, is_interleaved=True)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    has_bias = file.boolean("attention_bias", True)
    num_experts = read_num_experts(file, "num_local_experts", "num_experts")
    shape = MixtureShape(
        num_experts,
        file.integer("intermediate_size"),
        RoutingRule(read_top_k(file, num_experts, 4), score="softmax_after_topk"),
        NAMES,
        clamped_swiglu(file.number("swiglu_alpha", 1.702), file.number("swiglu_limit", 7.0)),
        has_router_bias=True,
        has_expert_biases=True,
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=64,
        attention=AttentionShape(qkv_bias=has_bias, output_bias=has_bias, has_sinks=True),
        layer_windows=read_windows(file, all_but_every(2), 128),
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=150_000.0,
    )
    return with_mixtures(read_decoder(file, traits), shape, all_layers(file))
