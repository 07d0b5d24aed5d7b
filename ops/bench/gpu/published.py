"""Models that are more than a dense decoder, by the fields of their published `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

_LAYERS = "num_hidden_layers"


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """A model, and how much of it is measured: its first layers, in full width, with the whole vocabulary.

    Attributes:
        name: Of the published model.
        fields: Of its `config.json`, those that say what it computes; lists have an entry a layer.
        num_layers: Layers that are measured: as many as leave room for a cache on a GPU of 78 GiB.
        checked: Fields that differ where two layers are compared with `transformers`, so that both kinds of layers are
            among the two.
    """

    name: str
    fields: Mapping[str, Any]
    num_layers: int
    checked: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The name, and how many layers there are."""
        return f"{self.name}/{self.num_layers}L"

    def config(self) -> dict[str, Any]:
        """Return the fields of a checkpoint that ends after these layers."""
        cut = {
            name: list(value[: self.num_layers]) if isinstance(value, tuple) else value
            for name, value in self.fields.items()
        }
        return {**cut, _LAYERS: self.num_layers}

    def first(self, num_layers: int) -> PublishedShape:
        """Return the model that is checked, which ends after so many layers."""
        return replace(self, fields={**self.fields, **self.checked}, num_layers=num_layers)

    def without(self, field: str) -> PublishedShape:
        """Return the same without a field."""
        return replace(self, fields={name: value for name, value in self.fields.items() if name != field})


def _fields(**fields: Any) -> Mapping[str, Any]:
    return MappingProxyType(fields)


QWEN3_30B_A3B = PublishedShape(
    "Qwen3-30B-A3B",
    _fields(
        architectures=("Qwen3MoeForCausalLM",),
        model_type="qwen3_moe",
        attention_bias=False,
        decoder_sparse_step=1,
        head_dim=128,
        hidden_act="silu",
        hidden_size=2048,
        intermediate_size=6144,
        max_position_embeddings=40_960,
        mlp_only_layers=(),
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=False,
        vocab_size=151_936,
    ),
    num_layers=24,
    checked=_fields(),
)
GPT_OSS_20B = PublishedShape(
    "gpt-oss-20b",
    _fields(
        architectures=("GptOssForCausalLM",),
        model_type="gpt_oss",
        attention_bias=True,
        head_dim=64,
        hidden_act="silu",
        hidden_size=2880,
        intermediate_size=2880,
        layer_types=("sliding_attention", "full_attention") * 12,
        max_position_embeddings=131_072,
        num_attention_heads=64,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_key_value_heads=8,
        num_local_experts=32,
        quantization_config={"quant_method": "mxfp4"},
        rms_norm_eps=1e-5,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150_000.0,
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
        vocab_size=201_088,
    ),
    num_layers=24,
    checked=_fields(),
)
DEEPSEEK_V2_LITE = PublishedShape(
    "DeepSeek-V2-Lite",
    _fields(
        architectures=("DeepseekV2ForCausalLM",),
        model_type="deepseek_v2",
        attention_bias=False,
        first_k_dense_replace=1,
        hidden_act="silu",
        hidden_size=2048,
        intermediate_size=10_944,
        kv_lora_rank=512,
        max_position_embeddings=163_840,
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        norm_topk_prob=False,
        num_attention_heads=16,
        num_experts_per_tok=6,
        num_hidden_layers=27,
        num_key_value_heads=16,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rms_norm_eps=1e-6,
        rope_scaling={
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        rope_theta=10_000.0,
        routed_scaling_factor=1.0,
        tie_word_embeddings=False,
        topk_group=1,
        topk_method="greedy",
        v_head_dim=128,
        vocab_size=102_400,
    ),
    num_layers=27,
    checked=_fields(),
)
QWEN3_NEXT_80B = PublishedShape(
    "Qwen3-Next-80B-A3B",
    _fields(
        architectures=("Qwen3NextForCausalLM",),
        model_type="qwen3_next",
        attention_bias=False,
        decoder_sparse_step=1,
        full_attention_interval=4,
        head_dim=256,
        hidden_act="silu",
        hidden_size=2048,
        intermediate_size=5120,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_value_head_dim=128,
        max_position_embeddings=262_144,
        mlp_only_layers=(),
        moe_intermediate_size=512,
        norm_topk_prob=True,
        num_attention_heads=16,
        num_experts=512,
        num_experts_per_tok=10,
        num_hidden_layers=48,
        num_key_value_heads=2,
        partial_rotary_factor=0.25,
        rms_norm_eps=1e-6,
        rope_theta=10_000_000.0,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=False,
        vocab_size=151_936,
    ),
    num_layers=12,
    checked=_fields(full_attention_interval=2),
)
PUBLISHED = (QWEN3_30B_A3B, GPT_OSS_20B, DEEPSEEK_V2_LITE, QWEN3_NEXT_80B)
