"""Qwen3-MoE: Qwen3 with small experts in place of its feed-forward blocks.

Qwen3-VL-MoE, whose published experts are stored transposed, is served without its vision tower.
"""

from __future__ import annotations

from types import MappingProxyType

from gpu_worker.layers.layer_traits import AttentionShape, HeadNorm
from gpu_worker.layers.mixture_shape import MixtureNames, MixtureShape
from gpu_worker.models.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, sparse_layers, with_silu_mixtures
from gpu_worker.models.text_part import text_names, text_part
from kernels.moe import RoutingRule

ARCHITECTURE = "Qwen3MoeForCausalLM"
ALSO = ("Qwen3VLMoeForConditionalGeneration",)

# What a text part means that does not say it. The number of experts has two names: this is the one that gives way.
_TEXT = MappingProxyType(
    {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "rope_theta": 5e5,
    }
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. A sliding window, which no published checkpoint has, is one of all layers."""
    is_turned = not set(ALSO).isdisjoint(file.texts("architectures"))
    file = text_part(file, _TEXT)
    attention_bias = file.boolean("attention_bias", False)
    windows = None
    if file.boolean("use_sliding_window", False) and "sliding_window" in file.names():
        windows = (file.integer("sliding_window"),) * len(all_layers(file))
    num_experts = read_num_experts(file, "num_experts", "num_local_experts")
    shape = MixtureShape(
        num_experts,
        file.integer("moe_intermediate_size"),
        RoutingRule(read_top_k(file, num_experts, 8), renormalize=file.boolean("norm_topk_prob", False)),
        MixtureNames(is_transposed=None if is_turned else False),
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=attention_bias, output_bias=attention_bias, head_norm=HeadNorm.HEADS),
        layer_windows=windows,
        block=BlockTraits(names=text_names(TensorNames())),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, sparse_layers(file))
