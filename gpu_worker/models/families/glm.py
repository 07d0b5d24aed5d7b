"""Zhipu's GLM-4, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.draft_head import nextn_tensors, read_nextn
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import later_layers, read_grouped_sigmoid, with_silu_mixtures

_GLM_NAMES = TensorNames(gate_up=("gate_up_proj",))


def read_glm(file: JsonFile) -> ModelConfig:
    """Read GLM-4 of 2024 (GLM): Llama whose heads turn by half, neighbouring dimensions together."""
    return read_decoder(file, glm_traits(file, _GLM_NAMES))


def glm_traits(file: JsonFile, names: TensorNames) -> FamilyTraits:
    """Return the traits that the dense models share."""
    return FamilyTraits(
        head_dim=128,
        attention=AttentionShape(interleaved=True, qkv_bias=file.boolean("attention_bias", True)),
        block=BlockTraits(names=names),
        norm_eps=("rms_norm_eps", 1.5625e-07),
        rotary_share=0.5,
    )


_GLM4_NAMES = TensorNames(
    after_mixer="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm", gate_up=("gate_up_proj",)
)


def read_glm4(file: JsonFile) -> ModelConfig:
    """Read GLM-4-0414 (dense): GLM with normalisations after the blocks too."""
    return read_decoder(file, glm_traits(file, _GLM4_NAMES))


def read_glm4_moe(file: JsonFile) -> ModelConfig:
    """Read GLM-4.5 and later mixtures: grouped routing with a bias, a shared expert, heads that rotate by half."""
    traits = FamilyTraits(
        attention=AttentionShape(
            qkv_bias=file.boolean("attention_bias", False),
            head_norm=HeadNorm.HEADS if file.boolean("use_qk_norm", False) else HeadNorm.NONE,
        ),
        block=BlockTraits(names=TensorNames(unused=nextn_tensors(file))),
        norm_eps=("rms_norm_eps", 1e-5),
        rotary_share=0.5,
    )
    config = with_silu_mixtures(file, read_decoder(file, traits), read_grouped_sigmoid(file), later_layers(file, 1))
    return replace(config, draft_head=read_nextn(file))


FAMILIES = (
    Family("GlmForCausalLM", read_glm, defaults={"num_key_value_heads": 2}),
    Family("Glm4ForCausalLM", read_glm4, defaults={"num_key_value_heads": 2}),
    Family("Glm4MoeForCausalLM", read_glm4_moe, defaults={"num_key_value_heads": 8}),
)
