"""What GGUF metadata say about families with Mamba-2: Mamba 2 itself, Nemotron-H, Granite 4 and Bamba, Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_fields import (
    MAX_HEADS,
    Fields,
    GGUFFamily,
    by_layer,
    has_qkv_bias,
    layer_parts,
    read_eps,
    state_heads,
    with_plain_names,
    with_rope,
)
from gpu_worker.quantization.gguf.errors import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile

_ATTENTION, _MAMBA, _DENSE, _EXPERTS = "attention", "mamba", "mlp", "moe"


def _shape(file: GGUFFile, part: str) -> tuple[int, ...]:
    """Return the shape of a tensor that some layers have.

    Raises:
        GGUFError: None has it.
    """
    found = (info.shape for name, info in file.tensors.items() if name.startswith("blk.") and name.endswith(f".{part}"))
    shape = next(found, None)
    if shape is None:
        raise GGUFError(file.path, f"tensor {part!r}", "is missing in all layers; the metadata call for it")
    return shape


def _mamba2_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read Mamba 2, whose layers are nothing else."""
    metadata, ssm, parts = file.metadata, f"{prefix}.ssm", layer_parts(file)
    num_heads, head_dim = state_heads(file, prefix)
    hidden_size, inner = metadata.integer(f"{prefix}.embedding_length"), num_heads * head_dim
    if inner % hidden_size:
        problem = f"is {inner}; it must be a multiple of {prefix}.embedding_length ({hidden_size})"
        raise metadata.error(f"{ssm}.inner_size", problem)
    return {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "expand": inner // hidden_size,
        "n_groups": metadata.integer(f"{ssm}.group_count", 1),
        "state_size": metadata.integer(f"{ssm}.state_size"),
        "conv_kernel": metadata.integer(f"{ssm}.conv_kernel"),
        "use_conv_bias": "ssm_conv1d.bias" in parts,
        "use_bias": "ssm_in.bias" in parts,
        "layer_norm_epsilon": read_eps(file, prefix),
    }


def _nemotron_h_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read Nemotron-H: what a layer is, its numbers of key heads and of inner features tell."""
    metadata, ssm, parts = file.metadata, f"{prefix}.ssm", layer_parts(file)
    num_heads, head_dim = state_heads(file, prefix)
    kv_heads, inner = (
        by_layer(file, f"{prefix}.attention.head_count_kv"),
        by_layer(file, f"{prefix}.feed_forward_length"),
    )

    def kind(index: int) -> str:
        if inner[index]:
            return _EXPERTS if f"blk.{index}.ffn_gate_inp.weight" in file.tensors else _DENSE
        return _ATTENTION if kv_heads[index] else _MAMBA

    kinds = [kind(index) for index in range(len(inner))]
    dense = [size for size, kind in zip(inner, kinds, strict=True) if kind == _DENSE]
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(kv_heads, default=1) or 1,
        # The name that the family gives it, and what `transformers` calls it.
        "attention_head_dim": metadata.integer(f"{prefix}.attention.key_length"),
        "head_dim": metadata.integer(f"{prefix}.attention.key_length"),
        "intermediate_size": dense[0] if dense else 1,
        "mamba_num_heads": num_heads,
        "mamba_head_dim": head_dim,
        "n_groups": metadata.integer(f"{ssm}.group_count", 1),
        "ssm_state_size": metadata.integer(f"{ssm}.state_size"),
        "conv_kernel": metadata.integer(f"{ssm}.conv_kernel"),
        "use_conv_bias": "ssm_conv1d.bias" in parts,
        "use_bias": "ssm_in.bias" in parts,
        "mlp_bias": "ffn_up.bias" in parts,
        "layer_norm_epsilon": read_eps(file, prefix),
        **(_nemotron_experts(file, prefix) if _EXPERTS in kinds else {}),
    }


def _nemotron_experts(file: GGUFFile, prefix: str) -> Fields:
    metadata = file.metadata
    groups = metadata.integer(f"{prefix}.expert_group_count", 1)
    return {
        "n_routed_experts": metadata.integer(f"{prefix}.expert_count"),
        "num_experts_per_tok": metadata.integer(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": metadata.integer(f"{prefix}.expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": _shape(file, "ffn_up_shexp.weight")[0],
        "moe_latent_size": metadata.integer(f"{prefix}.moe_latent_size", 0, minimum=0),
        "norm_topk_prob": metadata.boolean(f"{prefix}.expert_weights_norm", True),
        "routed_scaling_factor": metadata.number(f"{prefix}.expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": metadata.integer(f"{prefix}.expert_group_used_count", groups),
    }


def _granite_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read Granite 4, and Bamba, which has a rotation instead of factors: layers with key heads attend."""
    metadata, ssm, parts = file.metadata, f"{prefix}.ssm", layer_parts(file)
    num_heads, head_dim = state_heads(file, prefix)
    kv_heads = by_layer(file, f"{prefix}.attention.head_count_kv")
    hidden_size = metadata.integer(f"{prefix}.embedding_length")
    attention_dim = hidden_size // max(1, metadata.integer(f"{prefix}.attention.head_count", maximum=MAX_HEADS))
    attention_dim = metadata.integer(f"{prefix}.attention.key_length", attention_dim, minimum=4)
    turns = metadata.boolean(f"{prefix}.rope.scaling.finetuned", True)
    rotary_dim = metadata.integer(f"{prefix}.rope.dimension_count", attention_dim)
    return {
        "layer_types": [_ATTENTION if count else _MAMBA for count in kv_heads],
        "num_key_value_heads": max(kv_heads, default=1) or 1,
        "head_dim": attention_dim,
        "attention_bias": has_qkv_bias(parts),
        "attention_multiplier": metadata.number(f"{prefix}.attention.scale", attention_dim**-0.5),
        "embedding_multiplier": metadata.number(f"{prefix}.embedding_scale", 1.0),
        "residual_multiplier": metadata.number(f"{prefix}.residual_scale", 1.0),
        "logits_scaling": metadata.number(f"{prefix}.logit_scale", 1.0),
        "position_embedding_type": "rope" if turns else "nope",
        # Half a dimension more, so that the product is not rounded below the number.
        "partial_rotary_factor": min(1.0, (rotary_dim + 0.5) / attention_dim),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 10_000.0),
        **_granite_blocks(file, prefix),
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_expand": num_heads * head_dim // hidden_size,
        "mamba_n_groups": metadata.integer(f"{ssm}.group_count", 1),
        "mamba_d_state": metadata.integer(f"{ssm}.state_size"),
        "mamba_d_conv": metadata.integer(f"{ssm}.conv_kernel"),
        "mamba_conv_bias": "ssm_conv1d.bias" in parts,
        "mamba_proj_bias": "ssm_in.bias" in parts,
    }


def _granite_blocks(file: GGUFFile, prefix: str) -> Fields:
    """Read the sizes of experts and of the one that all tokens get, which without experts is the layer's block."""
    metadata = file.metadata
    num_experts = metadata.integer(f"{prefix}.expert_count", 0, minimum=0)
    if not num_experts:
        inner_size = _shape(file, "ffn_up.weight")[0]
        return {"num_local_experts": 0, "intermediate_size": inner_size, "shared_intermediate_size": inner_size}
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": metadata.integer(f"{prefix}.expert_used_count"),
        "intermediate_size": _shape(file, "ffn_up_exps.weight")[1],
        "shared_intermediate_size": _shape(file, "ffn_up_shexp.weight")[0],
    }


def _finish_granite(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    """Blocks and experts have one name each here, whether there are both kinds or not."""
    config = with_plain_names(replace(config, block=replace(config.block, names=TensorNames())))
    turns = file.metadata.boolean(f"{prefix}.rope.scaling.finetuned", True)
    return with_rope(file, prefix, config) if turns else config


def _falcon_h1_fields(file: GGUFFile, prefix: str) -> Fields:
    """Read Falcon-H1, whose factors are in the file's weights."""
    metadata, ssm = file.metadata, f"{prefix}.ssm"
    num_heads, head_dim = state_heads(file, prefix)
    parts = layer_parts(file)
    return {
        "num_key_value_heads": metadata.integer(f"{prefix}.attention.head_count_kv", maximum=MAX_HEADS),
        "head_dim": metadata.integer(f"{prefix}.attention.key_length"),
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length"),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 10_000.0),
        "mamba_d_ssm": num_heads * head_dim,
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": metadata.integer(f"{ssm}.group_count"),
        "mamba_d_state": metadata.integer(f"{ssm}.state_size"),
        "mamba_d_conv": metadata.integer(f"{ssm}.conv_kernel"),
        "mamba_conv_bias": "ssm_conv1d.bias" in parts,
        "mamba_proj_bias": "ssm_in.bias" in parts,
        "projectors_bias": "ssm_out.bias" in parts,
        "attention_bias": has_qkv_bias(parts),
        "mlp_bias": "ffn_up.bias" in parts,
        # llama.cpp normalises behind the gate.
        "mamba_rms_norm": "ssm_norm.weight" in parts,
        "mamba_norm_before_gate": False,
    }


_NEMOTRON_H = GGUFFamily(_nemotron_h_fields)
MAMBA_FAMILIES: Mapping[str, GGUFFamily] = MappingProxyType(
    {
        "mamba2": GGUFFamily(_mamba2_fields),
        "nemotron_h": _NEMOTRON_H,
        "nemotron_h_moe": _NEMOTRON_H,
        "granitehybrid": GGUFFamily(_granite_fields, _finish_granite),
        "falcon-h1": GGUFFamily(_falcon_h1_fields),
    }
)
"""By what GGUF calls them."""
