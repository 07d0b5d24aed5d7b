"""Dense families, each with sizes that are odd somewhere and options that matter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.gpu_worker.models.families.random_models import Case, case

_UNTIED = {"tie_word_embeddings": False}
_WIDE_HEADS = {"head_dim": 20}
_LOCAL = {"sliding_window": 9}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
_PLAIN = {"rope_type": "default", "rope_theta": 80.0}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
_GEMMA4_E = {
    **_WIDE_HEADS, **_LOCAL, "global_head_dim": 28, "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 97,
    "use_double_wide_mlp": True, "final_logit_softcapping": 5.0,
}  # fmt: skip
_GRANITE = {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 2.0}


def longrope(num_pairs: int, trained_len: int) -> dict[str, Any]:
    """Two sets of divisors, of which the sequences' length chooses."""
    return {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0 + 0.1 * pair for pair in range(num_pairs)],
            "long_factor": [1.0 + 0.5 * pair for pair in range(num_pairs)],
            "original_max_position_embeddings": trained_len,
        },
        "original_max_position_embeddings": trained_len,
    }


CASES: Mapping[str, Case] = {
    "gemma": case("Gemma", _WIDE_HEADS, hidden_activation=None),
    "gemma2": case("Gemma2", _WIDE_HEADS, _LOCAL, query_pre_attn_scalar=30, attn_logit_softcapping=3.0),
    "gemma3": case(
        "Gemma3Text", _WIDE_HEADS, _LOCAL, num_hidden_layers=3, sliding_window_pattern=2,
        rope_parameters={"full_attention": _LINEAR, "sliding_attention": _PLAIN}, model="Gemma3",
    ),
    "gemma4": case(
        "Gemma4Text", _WIDE_HEADS, _LOCAL, hidden_size_per_layer_input=0, global_head_dim=28, attention_k_eq_v=True,
        num_global_key_value_heads=1, layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=5.0,
        model="Gemma4",
    ),
    "gemma4-e": case(
        "Gemma4Text", _GEMMA4_E, num_hidden_layers=5, num_kv_shared_layers=2,
        layer_types=[*["sliding_attention", "full_attention"] * 2, "full_attention"], model="Gemma4",
    ),
    "phi3": case("Phi3", num_key_value_heads=1, partial_rotary_factor=0.5),
    "phi3-long": case("Phi3", longrope(3, 16)),
    "olmo2": case("Olmo2", attention_bias=True),
    "olmo3": case(
        "Olmo3", _LOCAL, layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"full_attention": _YARN, "sliding_attention": _PLAIN},
    ),
    "smollm3": case("SmolLM3", no_rope_layer_interval=2, num_hidden_layers=3),
    "granite": case("Granite", _GRANITE, attention_bias=True),
    "seed-oss": case("SeedOss", _WIDE_HEADS, attention_out_bias=True),
    "cohere": case("Cohere", logit_scale=0.5, attention_bias=True),
    "cohere2": case(
        "Cohere2", _LOCAL, logit_scale=0.5, num_hidden_layers=3, layer_types=None, sliding_window_pattern=2,
    ),
    "exaone4": case("Exaone4", _LOCAL, num_hidden_layers=3, sliding_window_pattern=2),
    "starcoder2": case("Starcoder2", _LOCAL),
    "glm": case("Glm", head_dim=16),
    "glm4": case("Glm4", head_dim=16, attention_bias=True),
    "ministral": case("Ministral", _LOCAL, head_dim=12, layer_types=["full_attention", "sliding_attention"]),
    "ministral3": case(
        "Ministral3", head_dim=12,
        rope_parameters={**_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
    ),
}  # fmt: skip

MORE_CASES: Mapping[str, Case] = {
    "gemma-mqa-untied": case("Gemma", _WIDE_HEADS, _UNTIED, num_key_value_heads=1),
    "gemma2-no-caps": case("Gemma2", _WIDE_HEADS, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3-cap": case("Gemma3Text", _WIDE_HEADS, final_logit_softcapping=2.0, model="Gemma3"),
    "gemma4-inputs-only": case("Gemma4Text", _GEMMA4_E, _UNTIED, model="Gemma4"),
    "gemma4-e-keys-are-values": case(
        "Gemma4Text", _GEMMA4_E, num_hidden_layers=4, num_kv_shared_layers=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        attention_k_eq_v=True, num_global_key_value_heads=1, vocab_size_per_layer_input=101, num_key_value_heads=4,
        use_double_wide_mlp=False, dtype=torch.bfloat16, model="Gemma4",
    ),
    "phi3-window": case("Phi3", _LOCAL, tie_word_embeddings=True),
    "phi3-short": case("Phi3", longrope(3, 128)),
    "olmo2-mqa": case("Olmo2", num_key_value_heads=1, tie_word_embeddings=True),
    "smollm3-window": case("SmolLM3", _LOCAL, _UNTIED, use_sliding_window=True, no_rope_layers=[1, 0]),
    "granite-tied": case("Granite", _GRANITE, tie_word_embeddings=True, mlp_bias=True),
    "cohere-untied": case("Cohere", _UNTIED, logit_scale=0.5, num_key_value_heads=4),
    "exaone4-full": case("Exaone4", sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=True),
    "starcoder2-plain": case("Starcoder2", _UNTIED, use_bias=False, hidden_act="relu2"),
    "glm4-mha": case("Glm4", head_dim=12, num_key_value_heads=4, partial_rotary_factor=1.0),
    "glm4-16-bits": case("Glm4", head_dim=16, dtype=torch.bfloat16),
}  # fmt: skip
