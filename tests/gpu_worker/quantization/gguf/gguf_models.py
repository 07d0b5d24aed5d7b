"""Small random models of every family as GGUF files, written by the `gguf` package; `transformers` is the oracle.

The oracle computes with what the package makes of the file's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.gpu_worker.models.families.random_models import eager_model
from tests.gpu_worker.quantization.gguf.raw_blocks import Bytes, dequantized, random_rows
from tests.gpu_worker.quantization.gguf.written_file import written

VOCAB_SIZE = 99
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Mixtral": "llama", "GptOss": "gpt-oss"}


@dataclass(frozen=True)
class Variant:
    """A family with options of its configuration, and what the tensors are stored as."""

    family: str
    options: Mapping[str, Any]
    kind: Callable[[str], str]

    @property
    def architecture(self) -> str:
        return _ARCHITECTURES.get(self.family, self.family.lower())


def uniform(kind: str) -> Callable[[str], str]:
    return lambda name: kind


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


VARIANTS = {
    **{f"llama-{kind}": Variant("Llama", {}, uniform(kind)) for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0")},
    "llama-mixed": Variant("Llama", {}, mixed),
    "llama-small": Variant("Llama", {}, small),
    **{f"llama-{kind}": Variant("Llama", {}, uniform(kind)) for kind in ("Q2_K", "Q3_K", "IQ3_S", "IQ4_XS")},
    "llama-biases": Variant("Llama", {"attention_bias": True, "mlp_bias": True}, uniform("Q5_0")),
    "llama-tied": Variant("Llama", {"tie_word_embeddings": True}, uniform("Q4_1")),
    "llama-head-dim": Variant("Llama", {"head_dim": 128, "num_key_value_heads": 4}, uniform("Q4_K")),
    "llama-llama3": Variant("Llama", {"rope_parameters": LLAMA3}, uniform("Q6_K")),
    "llama-linear": Variant("Llama", {"rope_parameters": LINEAR, "max_position_embeddings": 32}, uniform("Q8_0")),
    "mistral": Variant("Mistral", {"sliding_window": None}, uniform("Q5_K")),
    "qwen2": Variant("Qwen2", {"tie_word_embeddings": True}, uniform("Q8_0")),
    "qwen2-yarn": Variant("Qwen2", {"rope_parameters": YARN, "max_position_embeddings": 32}, mixed),
    "qwen3": Variant("Qwen3", {"head_dim": 128}, mixed),
    "qwen3-Q5_K": Variant("Qwen3", {"tie_word_embeddings": True}, uniform("Q5_K")),
    "mixtral": Variant("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}, mixed),
    "qwen2-moe": Variant(
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
        uniform("Q8_0"),
    ),
    "qwen3-moe": Variant(
        "Qwen3Moe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 256,
            "head_dim": 64,
            "norm_topk_prob": True,
        },
        mixed,
    ),
    "olmoe-F16": Variant("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, uniform("F16")),
    "gpt-oss": Variant(
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 64,
            "sliding_window": 8,
            "rope_parameters": {**YARN, "truncate": False},
        },
        lambda name: "MXFP4" if "experts" in name else "Q8_0",
    ),
}


def make_oracle(variant: Variant, **options: Any) -> Any:
    """Make the random model that a file will be written of; `options` go before the variant's own."""
    sizes = {**SIZES, **variant.options, **options}
    return eager_model(variant.family, sizes, seed=sum(repr(variant.options).encode()))


def write_model(path: Path, name: str, **options: Any) -> Any:
    """Write a variant with the plain vocabulary, and return the oracle with the weights that the file holds."""
    return write_oracle(path, make_oracle(VARIANTS[name], **options), VARIANTS[name], plain_vocabulary)


def write_oracle(path: Path, oracle: Any, variant: Variant, vocabulary: Callable[[Any], None]) -> Any:
    """Write `oracle`, whose matrices become new random ones of the variant's types, and return it."""
    config, architecture = oracle.config, variant.architecture
    with written(path, architecture) as writer:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if head_dim != config.hidden_size // config.num_attention_heads:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
        _add_rope(writer, config.rope_parameters, head_dim)
        _add_expert_fields(writer, config)
        vocabulary(writer)
        for seed, (name, parameter) in enumerate(oracle.named_parameters()):
            if ".experts." in name:
                _add_expert_parameter(writer, variant.kind(name), name, parameter, config, seed)
            else:
                _add_parameter(writer, variant, name, parameter, config, seed)
    return oracle


def plain_vocabulary(writer: Any, size: int = VOCAB_SIZE) -> None:
    """Tokens without a meaning; the last two begin and end sequences."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{index}" for index in range(size)])
    writer.add_token_types([1] * (size - 2) + [3, 3])
    writer.add_token_merges([])
    writer.add_bos_token_id(size - 2)
    writer.add_eos_token_id(size - 1)


def _add_rope(writer: Any, rope: dict[str, Any], head_dim: int) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, head_dim))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> Any:
    """How much longer Llama 3's scaling makes each wavelength, as converters of such models write it."""
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / rope["factor"])).astype(np.float32)


def _add_parameter(writer: Any, variant: Variant, name: str, parameter: Any, config: Any, seed: int) -> None:
    if parameter.ndim == 1 or len(parameter) == 1 or name.endswith(("mlp.gate.weight", "mlp.router.weight")):
        # Routers are never quantized, and a matrix of one row is written as a vector.
        parameter = parameter.squeeze(0)
        stored = parameter.detach().numpy()
        writer.add_tensor(_gguf_name(name, variant), _reordered(stored, variant, name, config))
        return
    kind = variant.kind(name)
    rows, columns = parameter.shape
    spread = 0.3 if "embed_tokens" in name or "lm_head" in name else 1.5 / columns**0.5
    raw: Bytes = random_rows(kind, rows, columns, spread, seed)
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(dequantized(kind, raw)))
    raw = _reordered(raw, variant, name, config)
    writer.add_tensor(_gguf_name(name, variant), raw, raw_dtype=gguf.GGMLQuantizationType[kind])


def _gguf_name(name: str, variant: Variant) -> str:
    if name.endswith(".sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    if "post_attention_layernorm" in name and variant.architecture == "gpt-oss":
        return f"blk.{name.split('.')[2]}.post_attention_norm.weight"
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{_NAMES[part]}.{kind}"


def _reordered(rows: Any, variant: Variant, name: str, config: Any) -> Any:
    """Order the rows of Llama's queries and keys for a rotation of neighbours, as its converter does."""
    part = name.split(".")[-2]
    if variant.architecture != "llama" or part not in ("q_proj", "k_proj"):
        return rows
    heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _add_expert_fields(writer: Any, config: Any) -> None:
    """Add what metadata say of mixtures, if the model has any."""
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not num_experts:
        return
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)


def _add_expert_parameter(writer: Any, kind: str, name: str, parameter: Any, config: Any, seed: int) -> None:
    """Write one of `transformers`' stacks; its matrices become new random ones of the type."""
    block = f"blk.{name.split('.')[2]}"
    is_gpt_oss = config.model_type == "gpt_oss"
    if name.endswith("bias"):
        parts = _expert_parts(parameter.data, is_interleaved=is_gpt_oss) if "gate_up" in name else [parameter.data]
        for part, bias in zip(_expert_names(name), parts, strict=True):
            writer.add_tensor(f"{block}.{part}.bias", np.ascontiguousarray(bias.numpy()))
        return
    # As `[num_experts, out_features, in_features]`, of which the parts are views.
    matrices = parameter.data.mT if is_gpt_oss else parameter.data
    parts = _expert_parts(matrices, is_interleaved=is_gpt_oss) if "gate_up" in name else [matrices]
    for place, (part, matrix) in enumerate(zip(_expert_names(name), parts, strict=True)):
        count, rows, columns = matrix.shape
        raw = random_rows(kind, count * rows, columns, 1.5 / columns**0.5, seed + 1000 * place)
        matrix.copy_(torch.from_numpy(dequantized(kind, raw)).view(count, rows, columns))
        raw = raw.reshape(count, rows, -1)
        writer.add_tensor(f"{block}.{part}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])


def _expert_names(name: str) -> tuple[str, ...]:
    return ("ffn_gate_exps", "ffn_up_exps") if "gate_up" in name else ("ffn_down_exps",)


def _expert_parts(both: torch.Tensor, *, is_interleaved: bool) -> list[torch.Tensor]:
    """Return gates and up projections, as views along the second dimension."""
    if is_interleaved:
        return [both[:, 0::2], both[:, 1::2]]
    return list(both.chunk(2, dim=1))
