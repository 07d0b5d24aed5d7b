"""Mixtures without relatives: dots.llm1, gpt-oss, Mellum 2, MiniMax M2 and Solar Open."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, read_decoder, with_window_rope
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows
from gpu_worker.models.mixture_config import (
    all_layers,
    later_layers,
    mixture_layers,
    read_grouped_sigmoid,
    read_mixture,
    with_mixtures,
    with_silu_mixtures,
)
from gpu_worker.models.rope_config import max_model_len, read_rope
from kernels.activation.experts import clamped_swiglu


def read_dots1(file: JsonFile) -> ModelConfig:
    """Read dots.llm1: Qwen3's attention, and DeepSeek V3's routing behind the first layers."""
    first_window = file.integer("max_window_layers", 62, minimum=0)
    shape = read_grouped_sigmoid(file, 1408, counts=("n_routed_experts",))
    shape = replace(shape, rule=replace(shape.rule, renormalize=file.boolean("norm_topk_prob", False)))
    traits = FamilyTraits(
        attention=biased(file, AttentionShape(head_norm=HeadNorm.HEADS)),
        layer_windows=read_windows(file, lambda layer: layer >= first_window),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, later_layers(file, 0))


NAMES = MixtureNames(router=("mlp.router",), is_transposed=True, is_interleaved=True)


def read_gpt_oss(file: JsonFile) -> ModelConfig:
    """Read gpt-oss: sinks, sliding windows in every other layer, and experts of clamped numbers in MXFP4."""
    activation = clamped_swiglu(file.number("swiglu_alpha", 1.702), file.number("swiglu_limit", 7.0))
    shape = read_mixture(
        file, ("num_local_experts", "num_experts"), 4, score="softmax_after_topk", names=NAMES, activation=activation
    )
    shape = replace(shape, has_router_bias=True, has_expert_biases=True)
    traits = FamilyTraits(
        head_dim=64,
        attention=biased(file, AttentionShape(has_sinks=True), default=True),
        layer_windows=read_windows(file, all_but_every(2), 128),
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=150_000.0,
    )
    return with_mixtures(read_decoder(file, traits), shape, all_layers(file))


# Of the layer that drafts, which is not part of the model.
_MELLUM_NAMES = TensorNames(unused=(r"mtp\..*",))


def read_mellum(file: JsonFile) -> ModelConfig:
    """Read Mellum 2: Qwen3-MoE with windows in some layers, which rotate by another base, and dense blocks in some."""
    renormalize = file.boolean("norm_topk_prob", True)
    counts = ("num_experts", "num_local_experts")
    shape = read_mixture(file, counts, 8, "moe_intermediate_size", 896, renormalize=renormalize)
    full, sliding = read_rope(file, "full_attention", default_theta=5e5), read_rope(file, "sliding_attention")
    traits = FamilyTraits(
        head_dim=128,
        attention=biased(file, AttentionShape(head_norm=HeadNorm.HEADS)),
        layer_windows=read_windows(file, lambda _layer: False, default=1024),
        block=BlockTraits(names=_MELLUM_NAMES),
        rope=full,
        max_model_len=max_model_len(file, full),
    )
    config = with_window_rope(read_decoder(file, traits), sliding)
    return with_silu_mixtures(file, config, shape, mixture_layers(file, 0))


_BLOCK = "block_sparse_moe"
_MIXTURE = MixtureNames(
    router=(f"{_BLOCK}.gate", "mlp.gate"),
    experts=(f"{_BLOCK}.experts", "mlp.experts"),
    matrices=("w1", "w3", "w2"),
    choice_bias=f"{_BLOCK}.e_score_correction_bias",
)
_MINIMAX_M2_NAMES = TensorNames(renamed=((r"\.mlp\.e_score_correction_bias$", f".{_BLOCK}.e_score_correction_bias"),))


def read_minimax_m2(file: JsonFile) -> ModelConfig:
    """Read MiniMax M2: sigmoid routing with a bias, normalised queries and keys; `rotary_dim` dimensions rotate."""
    head_dim = file.integer("head_dim", 128)
    shape = read_mixture(
        file, ("num_local_experts",), 8, score="sigmoid", renormalize=True, names=_MIXTURE, has_choice_bias=True
    )
    traits = FamilyTraits(
        head_dim=128,
        attention=AttentionShape(head_norm=HeadNorm.WHOLE),
        block=BlockTraits(names=_MINIMAX_M2_NAMES),
        rotary_share=file.integer("rotary_dim", head_dim) / head_dim,
        rope_theta=5e6,
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))


def read_solar_open(file: JsonFile) -> ModelConfig:
    """Read Solar Open: Llama's attention, and GLM's routing and shared expert in every layer."""
    shape = read_grouped_sigmoid(file, 1280)
    traits = FamilyTraits(
        head_dim=128,
        attention=AttentionShape(qkv_bias=file.boolean("attention_bias", False)),
        inner_size=shape.expert_size,
        norm_eps=("rms_norm_eps", 1e-5),
        rope_theta=1e6,
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))


_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

FAMILIES = (
    Family("Dots1ForCausalLM", read_dots1, defaults={"num_key_value_heads": 32}),
    Family("GptOssForCausalLM", read_gpt_oss, defaults={"num_key_value_heads": 8, "rope_parameters": _GPT_OSS_ROPE}),
    Family("MellumForCausalLM", read_mellum, defaults={"num_key_value_heads": 4}),
    Family("MiniMaxM2ForCausalLM", read_minimax_m2, defaults={"num_key_value_heads": 8}),
    Family("SolarOpenForCausalLM", read_solar_open, defaults={"num_key_value_heads": 8}),
)
