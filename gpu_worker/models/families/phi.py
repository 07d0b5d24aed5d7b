"""Microsoft's Phi 1 to 4, and Phi-3.5-MoE."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, read_activation, read_decoder
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_uniform_windows
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from gpu_worker.models.rope_config import max_model_len, read_rope, rope_fields
from kernels.moe import RoutingRule

_PHI_NAMES = TensorNames(
    before_feed_forward=None,
    output="dense",
    up="fc1",
    down="fc2",
    renamed=((r"^model\.final_layernorm\.", "model.norm."),),
)


def read_phi(file: JsonFile) -> ModelConfig:
    """Read Phi 1, 1.5 and 2: parallel blocks behind one LayerNorm, heads that turn in part, and biases everywhere."""
    file.require("qk_layernorm", False, "as in all published checkpoints")
    traits = FamilyTraits(
        attention=AttentionShape(qkv_bias=True, output_bias=True),
        is_gated=False,
        mlp_bias=True,
        block=BlockTraits(
            norm=NormKind(is_centered=True, has_bias=True), names=_PHI_NAMES, is_parallel=True, has_head_bias=True
        ),
        activation=read_activation(file, default="gelu_new"),
        norm_eps=("layer_norm_eps", 1e-5),
        rotary_share=0.5,
    )
    return read_decoder(file, traits)


_PHI3_NAMES = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))


def read_phi3(file: JsonFile) -> ModelConfig:
    """Read Phi-3 and Phi-4: Llama with matrices that are stored as one, heads that turn in part, and LongRoPE."""
    traits = FamilyTraits(
        layer_windows=read_uniform_windows(file), block=BlockTraits(names=_PHI3_NAMES), norm_eps=("rms_norm_eps", 1e-5)
    )
    return read_decoder(file, traits)


_MIXTURE = MixtureNames(
    router=("block_sparse_moe.gate", "mlp.router"),
    experts=("block_sparse_moe.experts", "mlp.experts"),
    matrices=("w1", "w3", "w2"),
)


def read_phimoe(file: JsonFile) -> ModelConfig:
    """Read Phi-3.5-MoE: two experts a token by a sparse mixer, LayerNorm, LongRoPE, and biases."""
    num_experts = read_num_experts(file, "num_local_experts")
    top_k = read_top_k(file, num_experts, 2)
    if top_k != 2:
        raise file.error("num_experts_per_tok", f"is {top_k}; a sparse mixer chooses 2")
    jitter = file.number("router_jitter_noise", 0.01)
    shape = MixtureShape(
        num_experts, file.integer("intermediate_size"), RoutingRule(2, score="sparse_mixer", jitter=jitter), _MIXTURE
    )
    rope = _read_rope(file)
    traits = FamilyTraits(
        attention=biased(file),
        layer_windows=read_uniform_windows(file),
        block=BlockTraits(
            norm=NormKind(is_centered=True, has_bias=True), has_head_bias=file.boolean("lm_head_bias", False)
        ),
        norm_eps=("rms_norm_eps", 1e-5),
        rope=rope,
        max_model_len=max_model_len(file, rope),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))


def _read_rope(file: JsonFile) -> RopeParameters:
    """Read the rotation, which has an amplitude for short sequences and one for long ones."""
    rope = read_rope(file)
    if rope.rope_type is not RopeType.LONGROPE:
        return rope
    fields = rope_fields(file)
    short, long = fields.number("short_mscale"), fields.number("long_mscale")
    return replace(rope, attention_factor=short, long_attention_factor=long)


FAMILIES = (
    Family("PhiForCausalLM", read_phi),
    Family("Phi3ForCausalLM", read_phi3, defaults={"original_max_position_embeddings": 4096}),
    Family(
        "PhiMoEForCausalLM",
        read_phimoe,
        {"num_experts_per_tok": 2},
        also=("PhimoeForCausalLM",),
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6},
    ),
)
