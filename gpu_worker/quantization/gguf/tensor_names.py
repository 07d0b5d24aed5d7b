"""A GGUF file's tensors under the names that checkpoints of Hugging Face give them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile, TensorInfo

ENCODER = "bert"
"""The architecture of such files."""

ENCODERS = frozenset({ENCODER, "modern-bert", "nomic-bert", "jina-bert-v3", "eurobert"})
"""The architectures of files whose models attend in both directions."""

_ENCODER_MODEL: Mapping[str, str] = {
    "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm",
    # Of RoBERTa's head that scores; BERT's is not whole in such files.
    "cls": "classifier.dense", "cls.output": "classifier.out_proj",
}  # fmt: skip
_ENCODER_LAYER: Mapping[str, str] = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip
_ENCODER_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,3})\.)?([a-z_]+(?:\.output)?)\.(weight|bias)")


def encoder_name(name: str) -> str | None:
    """Return what a checkpoint calls the tensor, or None when no encoder that we serve has it."""
    match = _ENCODER_NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_ENCODER_MODEL[part]}.{kind}" if part in _ENCODER_MODEL else None
    return f"encoder.layer.{layer}.{_ENCODER_LAYER[part]}.{kind}" if part in _ENCODER_LAYER else None


ROPE_DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one a pair of dimensions. Part of the configuration; keeps its name."""

ROPE_SHORT_DIVISORS, ROPE_LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""LongRoPE's two sets of them."""

CONFIGURATION = frozenset({ROPE_DIVISORS, ROPE_SHORT_DIVISORS, ROPE_LONG_DIVISORS})
"""The tensors that are read with the configuration."""

_MODEL: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight", "output_norm.bias": "model.norm.bias", "output.bias": "lm_head.bias",
    "position_embd.weight": "model.embed_positions.weight",
    # What LFM2's files call the normalisation before the head.
    "token_embd_norm.weight": "model.norm.weight", "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight", **{name: name for name in CONFIGURATION},
}  # fmt: skip
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.up_proj", "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
_AFTER: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_AROUND: Mapping[str, str] = {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
# These call the normalisation before the feed-forward block as others call one behind attention.
_SECOND: Mapping[str, str] = {"post_attention_norm": "post_attention_layernorm"}
_QWEN_HYBRID: Mapping[str, str] = {
    **_SECOND, "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_MAMBA: Mapping[str, str] = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj",
}  # fmt: skip
# Layers of one block have one normalisation.
_NEMOTRON_H: Mapping[str, str] = {
    **_MAMBA, "attn_norm": "norm", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj", "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
}  # fmt: skip
_LFM2: Mapping[str, str] = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv", "shortconv.out_proj": "conv.out_proj", "ffn_gate_exps": "mlp.experts.w1",
    "ffn_up_exps": "mlp.experts.w3", "ffn_down_exps": "mlp.experts.w2",
}  # fmt: skip
_POST_NORM: Mapping[str, str] = {
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}
# What families have besides, or call otherwise.
_FAMILIES: Mapping[str, Mapping[str, str]] = {
    "gpt-oss": _SECOND, "glm4moe": _SECOND, "seed_oss": _SECOND, "gemma2": _AROUND, "gemma3": _AROUND,
    "gemma4": {
        **_AROUND, "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2", "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj",
        "ffn_gate_exps": "experts.gate_proj", "ffn_up_exps": "experts.up_proj",
        "ffn_gate_up_exps": "experts.gate_up_proj", "ffn_down_exps": "experts.down_proj",
    },
    "qwen3next": _QWEN_HYBRID, "qwen35": _QWEN_HYBRID, "qwen35moe": _QWEN_HYBRID,
    "falcon-h1": {**_MAMBA, "ffn_norm": "pre_ff_layernorm"},
    "granitehybrid": _MAMBA, "mamba2": _NEMOTRON_H, "nemotron_h": _NEMOTRON_H, "nemotron_h_moe": _NEMOTRON_H,
    "lfm2": _LFM2, "lfm2moe": _LFM2, "olmo2": _AFTER, "exaone4": _AFTER,
    "phi2": {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "chatglm": {"ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "gpt2": {
        "attn_norm": "ln_1", "attn_qkv": "self_attn.c_attn", "attn_output": "self_attn.c_proj", "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
    },
    "apertus": {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "afmoe": {
        "attn_gate": "self_attn.gate_proj", "ffn_norm": "pre_mlp_layernorm",
        "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_mlp_layernorm",
    },
    "modern-bert": {
        "attn_norm": "attn_norm", "attn_output": "self_attn.Wo", "ffn_norm": "mlp_norm", "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
    "nomic-bert": _POST_NORM,
    "jina-bert-v3": {**_POST_NORM, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
    },
}  # fmt: skip
# What checkpoints know without `.weight`.
_WHOLE: Mapping[str, str] = {
    "attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale", "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}  # fmt: skip
_MAMBA_WHOLE: Mapping[str, str] = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
_FAMILIES_WHOLE: Mapping[str, Mapping[str, str]] = {
    "lfm2moe": {"exp_probs_b.bias": "mlp.expert_bias"},
    # Its converter leaves `.weight` out.
    "falcon-h1": {**_MAMBA_WHOLE, "ffn_norm": "pre_ff_layernorm.weight"},
    # So does that of HY3, here.
    "hy_v3": {"exp_probs_b": "mlp.gate.e_score_correction_bias"},
    "granitehybrid": _MAMBA_WHOLE, "mamba2": _MAMBA_WHOLE, "nemotron_h": _MAMBA_WHOLE, "nemotron_h_moe": _MAMBA_WHOLE,
}  # fmt: skip
_NORMED_EMBEDDING: Mapping[str, str] = {
    **{f"token_embd_norm.{kind}": f"model.embedding_norm.{kind}" for kind in ("weight", "bias")},
    "token_types.weight": "model.segments.weight",
}
# Names outside of layers that mean something else in another family.
_FAMILIES_MODEL: Mapping[str, Mapping[str, str]] = dict.fromkeys(
    ("modern-bert", "nomic-bert", "jina-bert-v3"), _NORMED_EMBEDDING
)
_ANY_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.")
_LAYER_NAME = re.compile(
    r"blk\.(0|[1-9][0-9]{0,3})\.([a-z0-9_]+(?:\.(?:in_proj|out_proj|conv))?)(?:\.(weight|bias|scale))?"
)


def tensors_by_name(file: GGUFFile) -> dict[str, TensorInfo]:
    """Rename a file's tensors, without draft layers; `GGUFError` for a name that no served model has."""
    tensors = {}
    architecture = file.metadata.text("general.architecture", "")
    layer = {**_LAYER, **_FAMILIES.get(architecture, {})}
    whole = {**_WHOLE, **_FAMILIES_WHOLE.get(architecture, {})}
    outside = {**_MODEL, **_FAMILIES_MODEL.get(architecture, {})}
    for info in file.tensors.values():
        if _drafts(file, architecture, info.name):
            continue
        is_encoder = architecture == ENCODER
        name = encoder_name(info.name) if is_encoder else _checkpoint_name(info.name, layer, whole, outside)
        if name is None:
            raise GGUFError(file.path, f"tensor {info.name!r}", "is in no model that can be served")
        tensors[name] = info
    return tensors


def _checkpoint_name(
    name: str, parts: Mapping[str, str], wholes: Mapping[str, str], outside: Mapping[str, str]
) -> str | None:
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return outside.get(name)
    layer, part, kind = match.groups()
    if (whole := wholes.get(part if kind is None else f"{part}.{kind}")) is not None:
        return f"model.layers.{layer}.{whole}"
    return f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts and kind in ("weight", "bias") else None


def _drafts(file: GGUFFile, architecture: str, name: str) -> bool:
    metadata, field = file.metadata, f"{architecture}.nextn_predict_layers"
    match = _ANY_LAYER.match(name)
    if match is None or field not in metadata or (count := metadata.integer(field, minimum=0)) == 0:
        return False
    return int(match[1]) >= metadata.integer(f"{architecture}.block_count") - count
