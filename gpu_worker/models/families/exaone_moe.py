"""K-EXAONE: EXAONE 4's windows and heads with normalisation before the blocks, and DeepSeek V3's routing."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, map_attention, read_decoder
from gpu_worker.models.families import deepseek_v3, exaone4
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import grouped_sigmoid_rule, read_num_experts, with_silu_mixtures

ARCHITECTURE = "ExaoneMoeForCausalLM"

_NAMES = TensorNames(
    renamed=((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),), unused=(r"mtp\..*",)
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. The layers that draft are not taken."""
    num_experts = read_num_experts(file, "num_experts", "num_local_experts")
    inner_size = file.integer("moe_intermediate_size", 1024)
    shape = MixtureShape(
        num_experts,
        inner_size,
        replace(grouped_sigmoid_rule(file, num_experts), scale=file.number("routed_scaling_factor", 2.5)),
        MixtureNames(shared="mlp.shared_experts"),
        has_choice_bias=True,
        shared_size=inner_size * file.integer("num_shared_experts", 1, minimum=0),
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(head_norm=HeadNorm.HEADS),
        layer_windows=exaone4.read_pattern(file),
        block=BlockTraits(names=_NAMES),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    config = read_decoder(file, traits)
    if not file.is_null("sliding_window"):
        config = map_attention(config, lambda shape: replace(shape, rotary=None if shape.sliding_window is None else 0))
    return with_silu_mixtures(file, config, shape, deepseek_v3.mixture_layers(file, 1))
