"""What GGUF metadata say about families with Mamba-2: Mamba 2 itself, Nemotron-H, Granite 4 and Bamba, Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_fields import MAX_HEADS, Fields, GGUFFamily, ModelFields, with_plain_names, with_rope

_ATTENTION, _MAMBA, _DENSE, _EXPERTS = "attention", "mamba", "mlp", "moe"


def _own_states(gguf: ModelFields) -> Fields:
    """Read the fields of states that Mamba 2 and Nemotron-H have names of their own for."""
    return {
        "n_groups": gguf.integer("ssm.group_count", 1),
        "conv_kernel": gguf.integer("ssm.conv_kernel"),
        "use_conv_bias": "ssm_conv1d.bias" in gguf.parts,
        "use_bias": "ssm_in.bias" in gguf.parts,
        "layer_norm_epsilon": gguf.eps,
    }


def _mamba2_fields(gguf: ModelFields) -> Fields:
    num_heads, head_dim = gguf.state_heads()
    hidden_size, inner = gguf.integer("embedding_length"), num_heads * head_dim
    if inner % hidden_size:
        problem = f"is {inner}; it must be a multiple of {gguf.prefix}.embedding_length ({hidden_size})"
        raise gguf.error("ssm.inner_size", problem)
    return {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "expand": inner // hidden_size,
        "state_size": gguf.integer("ssm.state_size"),
        **_own_states(gguf),
    }


def _nemotron_h_fields(gguf: ModelFields) -> Fields:
    """Read Nemotron-H, where a layer's numbers of key heads and of inner features tell what it is."""
    num_heads, head_dim = gguf.state_heads()
    kv_heads, inner = gguf.by_layer("attention.head_count_kv"), gguf.by_layer("feed_forward_length")

    def kind(index: int) -> str:
        if inner[index]:
            return _EXPERTS if gguf.has_router[index] else _DENSE
        return _ATTENTION if kv_heads[index] else _MAMBA

    kinds = [kind(index) for index in range(len(inner))]
    dense = [size for size, kind in zip(inner, kinds, strict=True) if kind == _DENSE]
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(kv_heads, default=1) or 1,
        # The name that the family gives it, and what `transformers` calls it.
        **dict.fromkeys(("attention_head_dim", "head_dim"), gguf.integer("attention.key_length")),
        "intermediate_size": dense[0] if dense else 1,
        "mamba_num_heads": num_heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": gguf.integer("ssm.state_size"),
        **_own_states(gguf),
        "mlp_bias": "ffn_up.bias" in gguf.parts,
        **(_nemotron_experts(gguf) if _EXPERTS in kinds else {}),
    }


def _nemotron_experts(gguf: ModelFields) -> Fields:
    groups = gguf.integer("expert_group_count", 1)
    return {
        **gguf.experts("n_routed_experts"),
        "moe_shared_expert_intermediate_size": gguf.shape_of("ffn_up_shexp.weight")[0],
        "moe_latent_size": gguf.integer("moe_latent_size", 0, minimum=0),
        "norm_topk_prob": gguf.boolean("expert_weights_norm", True),
        "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": gguf.integer("expert_group_used_count", groups),
    }


def _mamba_states(gguf: ModelFields) -> Fields:
    """Read the fields of states, by the names that Bamba and those that followed it have."""
    num_heads, head_dim = gguf.state_heads()
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": gguf.integer("ssm.group_count", 1),
        "mamba_d_state": gguf.integer("ssm.state_size"),
        "mamba_d_conv": gguf.integer("ssm.conv_kernel"),
        "mamba_conv_bias": "ssm_conv1d.bias" in gguf.parts,
        "mamba_proj_bias": "ssm_in.bias" in gguf.parts,
        "attention_bias": gguf.has_qkv_bias,
        "rope_theta": gguf.number("rope.freq_base", 10_000.0),
    }


def _granite_fields(gguf: ModelFields) -> Fields:
    num_heads, head_dim = gguf.state_heads()
    kv_heads, hidden_size = gguf.by_layer("attention.head_count_kv"), gguf.integer("embedding_length")
    attention_dim = hidden_size // max(1, gguf.integer("attention.head_count", maximum=MAX_HEADS))
    attention_dim = gguf.integer("attention.key_length", attention_dim, minimum=4)
    turns = gguf.boolean("rope.scaling.finetuned", True)
    return {
        "layer_types": [_ATTENTION if count else _MAMBA for count in kv_heads],
        "num_key_value_heads": max(kv_heads, default=1) or 1,
        "head_dim": attention_dim,
        "attention_multiplier": gguf.number("attention.scale", attention_dim**-0.5),
        "embedding_multiplier": gguf.number("embedding_scale", 1.0),
        "residual_multiplier": gguf.number("residual_scale", 1.0),
        "logits_scaling": gguf.number("logit_scale", 1.0),
        "position_embedding_type": "rope" if turns else "nope",
        "partial_rotary_factor": gguf.turning_share(attention_dim),
        "mamba_expand": num_heads * head_dim // hidden_size,
        **_mamba_states(gguf),
        **_granite_blocks(gguf),
    }


def _granite_blocks(gguf: ModelFields) -> Fields:
    num_experts = gguf.integer("expert_count", 0, minimum=0)
    if not num_experts:
        inner_size = gguf.shape_of("ffn_up.weight")[0]
        return {"num_local_experts": 0, "intermediate_size": inner_size, "shared_intermediate_size": inner_size}
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": gguf.integer("expert_used_count"),
        "intermediate_size": gguf.shape_of("ffn_up_exps.weight")[1],
        "shared_intermediate_size": gguf.shape_of("ffn_up_shexp.weight")[0],
    }


def _finish_granite(gguf: ModelFields, config: ModelConfig) -> ModelConfig:
    """Blocks and experts have one name each here, whether there are both kinds or not."""
    config = with_plain_names(replace(config, block=replace(config.block, names=TensorNames())))
    return with_rope(gguf, config) if gguf.boolean("rope.scaling.finetuned", True) else config


def _falcon_h1_fields(gguf: ModelFields) -> Fields:
    """Read Falcon-H1, whose factors are in the file's weights."""
    num_heads, head_dim = gguf.state_heads()
    return {
        **gguf.attention(),
        **_mamba_states(gguf),
        "intermediate_size": gguf.integer("feed_forward_length"),
        "mamba_d_ssm": num_heads * head_dim,
        "projectors_bias": "ssm_out.bias" in gguf.parts,
        "mlp_bias": "ffn_up.bias" in gguf.parts,
        # llama.cpp normalises behind the gate.
        "mamba_rms_norm": "ssm_norm.weight" in gguf.parts,
        "mamba_norm_before_gate": False,
    }


_NEMOTRON_H = GGUFFamily(_nemotron_h_fields)
MAMBA_FAMILIES: Mapping[str, GGUFFamily] = {
    "mamba2": GGUFFamily(_mamba2_fields),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "granitehybrid": GGUFFamily(_granite_fields, _finish_granite),
    "falcon-h1": GGUFFamily(_falcon_h1_fields),
}
"""By what GGUF calls them."""
