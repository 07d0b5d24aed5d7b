"""Small random models of every family as GGUF files, written by the `gguf` package; `transformers` is the oracle.

The oracle computes with what the package makes of the file's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gpu_worker.quantization.gguf.converted import THETA, YARN, Converted
from tests.gpu_worker.quantization.gguf.family_files import write_family
from tests.gpu_worker.quantization.gguf.written_file import VOCAB_SIZE

SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", **THETA, "factor": 4.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", **THETA, "factor": 4.0}
_ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Mixtral": "llama", "GptOss": "gpt-oss"}


def mixed(name: str) -> str:
    """Types as llama.cpp's Q4_K_M mixes them: more bits for some tensors of a layer, so fused parts are unlike."""
    parts = {"v_proj": "Q6_K", "down_proj": "Q5_K", "embed_tokens": "Q6_K", "lm_head": "Q6_K", "up_proj": "Q8_0"}
    return next((kind for part, kind in parts.items() if part in name), "Q4_K")


def small(name: str) -> str:
    """Types of the smallest files: K of 2 and 3 bits and such whose numbers stand in tables, some for each."""
    parts = {
        **{"q_proj": "IQ2_XXS", "k_proj": "IQ2_XS", "v_proj": "IQ3_S", "o_proj": "IQ2_S", "lm_head": "IQ4_NL"},
        **{"gate_proj": "Q2_K", "up_proj": "IQ3_XXS", "down_proj": "Q3_K", "embed_tokens": "IQ4_XS"},
    }
    return next((kind for part, kind in parts.items() if part in name), "F32")


def _variant(family: str, options: Mapping[str, Any], kind: str | Callable[[str], str]) -> Converted:
    architecture = _ARCHITECTURES.get(family, family.lower())
    blocks = (lambda name: kind) if isinstance(kind, str) else kind
    return Converted(architecture, family, {**SIZES, **options}, blocks=blocks)


VARIANTS = {
    **{f"llama-{kind}": _variant("Llama", {}, kind) for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0")},
    "llama-mixed": _variant("Llama", {}, mixed),
    "llama-small": _variant("Llama", {}, small),
    **{f"llama-{kind}": _variant("Llama", {}, kind) for kind in ("Q2_K", "Q3_K", "IQ3_S", "IQ4_XS")},
    "llama-biases": _variant("Llama", {"attention_bias": True, "mlp_bias": True}, "Q5_0"),
    "llama-tied": _variant("Llama", {"tie_word_embeddings": True}, "Q4_1"),
    "llama-head-dim": _variant("Llama", {"head_dim": 128, "num_key_value_heads": 4}, "Q4_K"),
    "llama-llama3": _variant("Llama", {"rope_parameters": LLAMA3}, "Q6_K"),
    "llama-linear": _variant("Llama", {"rope_parameters": LINEAR, "max_position_embeddings": 32}, "Q8_0"),
    "mistral": _variant("Mistral", {"sliding_window": None}, "Q5_K"),
    "qwen2": _variant("Qwen2", {"tie_word_embeddings": True}, "Q8_0"),
    "qwen2-yarn": _variant("Qwen2", {"rope_parameters": YARN, "max_position_embeddings": 32}, mixed),
    "qwen3": _variant("Qwen3", {"head_dim": 128}, mixed),
    "qwen3-Q5_K": _variant("Qwen3", {"tie_word_embeddings": True}, "Q5_K"),
    "mixtral": _variant("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}, mixed),
    "qwen2-moe": _variant(
        "Qwen2Moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
        "Q8_0",
    ),
    "qwen3-moe": _variant(
        "Qwen3Moe",
        {
            "num_local_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "head_dim": 64,
            "norm_topk_prob": True,
        },
        mixed,
    ),
    "olmoe-F16": _variant("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, "F16"),
    "gpt-oss": _variant(
        "GptOss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 8,
            "rope_parameters": {**YARN, "truncate": False},
        },
        lambda name: "MXFP4" if "experts" in name else "Q8_0",
    ),
}  # fmt: skip


def write_model(path: Path, name: str, vocabulary: Callable[[Any], None] | None = None, **options: Any) -> Any:
    """Write a variant with other options, and return the oracle with the weights that the file holds."""
    variant = VARIANTS[name]
    return write_family(path, replace(variant, options={**variant.options, **options}), vocabulary)
