"""What a GGUF file's metadata and tensors say about mixtures of experts, and about families whose layers differ.

What the files of Llama 4, MiMo V2, HY3 and AFMoE do not say, llama.cpp knows by the architecture, as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_fields import (
    MAX_HEADS,
    Fields,
    GGUFFamily,
    ModelFields,
    plain_names,
    with_plain_names,
    with_rope,
)
from kernels.moe import RoutingRule
from kernels.moe.reference import Score

_MAX_EXPERTS = 1 << 12
# What llama.cpp numbers them.
_SIGMOID = 2
_SCORES: Mapping[int, Score] = {1: "softmax", _SIGMOID: "sigmoid"}
# Where the weights of a token's experts add up to one, and no field says so, unlike in `config.json`.
_RENORMALIZED = frozenset({"qwen3moe", "exaone-moe", "mellum"})
_MIXED = (
    *("llama", "qwen2moe", "qwen3moe", "olmoe", "granitemoe", "glm4moe", "deepseek2", "dots1", "ernie4_5-moe"),
    *("exaone-moe", "hunyuan-moe", "mellum", "minimax-m2", "phimoe", "gpt-oss"),
)


def expert_fields(gguf: ModelFields) -> Fields:
    """Read what families call sizes and numbers of experts, each by a name of its own; nothing where there are none."""
    counts = "expert_count"
    num_experts = gguf.integer(counts, 0, minimum=0, maximum=_MAX_EXPERTS)
    if num_experts == 0:
        if mixture_layers(gguf):
            raise gguf.error(counts, "is missing or 0, but layers have routers; copy the file again")
        return {}
    if gguf.prefix not in _MIXED:
        raise gguf.error(counts, f"is {num_experts}; experts are supported in {', '.join(_MIXED)}")
    top_k = gguf.integer("expert_used_count")
    if top_k > num_experts:
        raise gguf.error("expert_used_count", f"is {top_k}; there are {num_experts} experts")
    layers, count = mixture_layers(gguf), gguf.num_layers
    dense = [index for index in range(count) if index not in layers]
    size = _expert_size(gguf)
    fields: Fields = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), num_experts),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), top_k),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), size),
        # Those of all tokens are what the tensors say.
        "shared_expert_intermediate_size": size,
        "mlp_only_layers": dense,
        "mlp_layer_types": ["dense" if index in dense else "sparse" for index in range(count)],
        **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), min(layers, default=0)),
    }
    if gguf.prefix in _RENORMALIZED:
        fields["norm_topk_prob"] = True
    elif gguf.prefix != "deepseek2":
        fields["norm_topk_prob"] = False
    return fields


def finish_mixture(gguf: ModelFields, shape: MixtureShape) -> MixtureShape:
    """Return a family's mixture with what the file's metadata and tensors say."""
    tensors, first = gguf.tensors, f"blk.{min(mixture_layers(gguf), default=0)}"
    shared = tensors.get(f"{first}.ffn_gate_shexp.weight")
    return replace(
        shape,
        rule=_finish_rule(gguf, shape.num_experts, shape.rule),
        expert_size=_expert_size(gguf),
        names=plain_names(shape),
        has_choice_bias=f"{first}.exp_probs_b.bias" in tensors,
        has_router_bias=f"{first}.ffn_gate_inp.bias" in tensors,
        has_expert_biases=f"{first}.ffn_gate_exps.bias" in tensors,
        shared_size=0 if shared is None else shared.shape[0],
        has_shared_gate=f"{first}.ffn_gate_inp_shexp.weight" in tensors,
    )


def _expert_size(gguf: ModelFields) -> int:
    inner_size = gguf.integer("feed_forward_length")
    return gguf.integer("expert_feed_forward_length", inner_size)


def _finish_rule(gguf: ModelFields, num_experts: int, rule: RoutingRule) -> RoutingRule:
    top_k = rule.top_k
    function = "expert_gating_func"
    number = gguf.integer(function, 0, minimum=0)
    if gguf.prefix == "deepseek2" and not number and any(name.endswith(".exp_probs_b.bias") for name in gguf.tensors):
        # Converters do not say of all of V3's kin that they have what V2 has not.
        number = _SIGMOID
    if number not in _SCORES and number:
        raise gguf.error(function, f"is {number}; supported: 1 (softmax) and 2 (sigmoid)")
    score = _SCORES.get(number, rule.score) if rule.score in _SCORES.values() else rule.score
    groups, chosen = "expert_group_count", "expert_group_used_count"
    num_groups = gguf.integer(groups, 1, maximum=_MAX_EXPERTS)
    top_k_groups = gguf.integer(chosen, num_groups, maximum=_MAX_EXPERTS)
    if num_experts % num_groups:
        raise gguf.error(groups, f"is {num_groups}; it must divide {gguf.prefix}.expert_count ({num_experts})")
    if top_k_groups > num_groups or top_k > num_experts // num_groups * top_k_groups:
        problem = f"is {top_k_groups} of {num_groups} groups; they must hold the {top_k} experts that a token gets"
        raise gguf.error(chosen, problem)
    return replace(
        rule,
        score=score,
        renormalize=gguf.boolean("expert_weights_norm", rule.renormalize),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        group_score="top2" if score == "sigmoid" else "max",
        scale=gguf.number("expert_weights_scale", 1.0),
    )


def mixture_layers(gguf: ModelFields) -> frozenset[int]:
    """Return the numbers of the layers that have a router."""
    names = (name.split(".") for name in gguf.tensors if name.endswith(".ffn_gate_inp.weight"))
    return frozenset(int(parts[1]) for parts in names if parts[1].isdecimal())


# Of Llama 4 Maverick, whose queries and keys are not normalised; Scout's, with fewer experts, are.
_MAVERICK_EXPERTS = 128
_CHUNK = 8192
# Of Llama 4, the last one of this many layers does not rotate; of AFMoE, it has no window.
_STILL_PERIOD = _FULL_PERIOD = 4


def _llama4_fields(gguf: ModelFields) -> Fields:
    # Zero is written where all layers rotate and see everything.
    is_plain = "attention.sliding_window" in gguf and gguf.integer("attention.sliding_window", minimum=0) == 0
    num_experts = gguf.integer("expert_count")
    return {
        **gguf.attention(500_000.0),
        "attention_bias": gguf.has_qkv_bias,
        "use_qk_norm": num_experts != _MAVERICK_EXPERTS,
        "attention_chunk_size": None if is_plain else _CHUNK,
        # An interval of more than there are layers.
        "no_rope_layer_interval": 1025 if is_plain else _STILL_PERIOD,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "intermediate_size_mlp": gguf.integer("feed_forward_length"),
        "intermediate_size": gguf.integer("expert_feed_forward_length"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": gguf.integer("expert_used_count"),
        "interleave_moe_layer_step": gguf.integer("interleave_moe_layer_step"),
    }


def _mimo_fields(gguf: ModelFields) -> Fields:
    """Read the fields as published configurations name them; layers that draft, behind the last one, are left out."""
    head_dim, layers = gguf.integer("attention.key_length", maximum=MAX_HEADS), range(gguf.num_layers)
    slides = gguf.by_layer("attention.sliding_window_pattern")
    kv_heads = gguf.by_layer("attention.head_count_kv")
    sinks = [f"blk.{layer}.attn_sinks.weight" in gguf.tensors for layer in layers]
    return {
        # All layers of a kind have one number; of a kind that no layer is, nothing is read.
        "num_key_value_heads": max(kv_heads[i] for i in layers if not slides[i] or all(slides)),
        "swa_num_key_value_heads": max(kv_heads[i] for i in layers if slides[i] or not any(slides)),
        "head_dim": head_dim,
        "v_head_dim": gguf.integer("attention.value_length", head_dim),
        "attention_value_scale": gguf.optional_number("attention.value_scale"),
        "attention_bias": gguf.has_qkv_bias,
        "add_full_attention_sink_bias": any(sinks[i] for i in layers if not slides[i]),
        "add_swa_attention_sink_bias": any(sinks[i] for i in layers if slides[i]),
        "hybrid_layer_pattern": slides,
        # The published number is of the tokens before a query: its reference implementation sees itself besides.
        "sliding_window_size": gguf.integer("attention.sliding_window"),
        "partial_rotary_factor": gguf.turning_share(head_dim),
        "rope_theta": gguf.number("rope.freq_base", 5e6),
        "swa_rope_theta": gguf.number("rope.freq_base_swa", 1e4),
        "intermediate_size": gguf.integer("feed_forward_length"),
        "moe_layer_freq": list(map(int, gguf.has_router)),
        **gguf.experts("n_routed_experts"),
        "n_group": gguf.integer("expert_group_count", 1),
        "topk_group": gguf.integer("expert_group_used_count", 1),
        "norm_topk_prob": gguf.boolean("expert_weights_norm", True),
        "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
    }


def _hy_v3_fields(gguf: ModelFields) -> Fields:
    """Read HY3; which layers have experts is seen by their routers."""
    experts = gguf.experts()
    size: int = experts["moe_intermediate_size"]
    return {
        **gguf.attention(),
        **experts,
        "intermediate_size": gguf.integer("feed_forward_length"),
        "attention_bias": gguf.has_qkv_bias,
        "router_scaling_factor": gguf.number("expert_weights_scale", 1.0),
        "num_shared_experts": max(1, gguf.integer("expert_shared_feed_forward_length", size) // size),
        "mlp_layer_types": ["sparse" if is_mixture else "dense" for is_mixture in gguf.has_router],
    }


def _afmoe_fields(gguf: ModelFields) -> Fields:
    """Read AFMoE, whose published models all scale their embeddings."""
    return {
        **gguf.attention(),
        **gguf.experts(),
        "intermediate_size": gguf.integer("feed_forward_length"),
        "num_shared_experts": gguf.integer("expert_shared_count", 1),
        "num_dense_layers": gguf.integer("leading_dense_block_count", 0, minimum=0),
        "route_scale": gguf.number("expert_weights_scale", 1.0),
        "sliding_window": gguf.integer("attention.sliding_window"),
        "global_attn_every_n_layers": _FULL_PERIOD,
        "mup_enabled": True,
    }


def _finish(gguf: ModelFields, config: ModelConfig) -> ModelConfig:
    """Return the model with the names and the rotation that files with mixtures have, whatever family it is."""
    return with_rope(gguf, with_plain_names(config))


SPARSE_FAMILIES: Mapping[str, GGUFFamily] = {
    "llama4": GGUFFamily(_llama4_fields, _finish),
    "mimo2": GGUFFamily(_mimo_fields, _finish),
    "hy_v3": GGUFFamily(_hy_v3_fields, _finish),
    "afmoe": GGUFFamily(_afmoe_fields, _finish),
}
"""Files of these architectures."""
