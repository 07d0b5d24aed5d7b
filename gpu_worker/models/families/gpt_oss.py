"""gpt-oss: sinks, sliding windows in every other layer, and experts of clamped numbers in MXFP4."""

from __future__ import annotations

from gpu_worker.layers.layer_traits import AttentionShape
from gpu_worker.layers.mixture_shape import MixtureNames, MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_mixtures
from kernels.moe import RoutingRule, clamped_swiglu

ARCHITECTURE = "GptOssForCausalLM"

_FULL, _SLIDING = "full_attention", "sliding_attention"

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
        layer_windows=_windows(file),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    return with_mixtures(read_decoder(file, traits), shape, all_layers(file))


def _windows(file: JsonFile) -> tuple[int | None, ...]:
    """Read which layers have a sliding window: the even ones, where nothing is said."""
    num_layers = len(all_layers(file))
    types = file.texts("layer_types") or (_SLIDING, _FULL) * num_layers
    if len(types := types[:num_layers]) != num_layers or set(types) - {_FULL, _SLIDING}:
        raise file.error("layer_types", f"must name {_FULL} or {_SLIDING} for each of the num_hidden_layers layers")
    window = None if file.is_null("sliding_window") else file.integer("sliding_window", 128)
    return tuple(window if kind == _SLIDING else None for kind in types)
