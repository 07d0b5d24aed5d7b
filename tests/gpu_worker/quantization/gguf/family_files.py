"""Small random models of more families as GGUF files, transformed as llama.cpp's converters transform them.

`transformers` is the oracle: it computes with the numbers that the file holds, which are rounded in the file's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tests.gpu_worker.models.families.random_models import eager_model
from tests.gpu_worker.quantization.gguf.gguf_models import VOCAB_SIZE, plain_vocabulary
from tests.gpu_worker.quantization.gguf.written_file import written


def add_fields(writer: Any, config: Any, architecture: str, *, whole_up: bool, num_drafting: int) -> None:
    """Add what all families have, then what this one has."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + num_drafting)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    eps = getattr(config, "layer_norm_eps", None) or getattr(config, "norm_epsilon", None)
    if eps is not None:
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if num_drafting:
        writer.add_nextn_predict_layers(num_drafting)
    if architecture == "deepseek2":
        _add_latent(writer, config, whole_up=whole_up)
    else:
        _add_heads(writer, config)
    _OWN.get(architecture, lambda writer, config: None)(writer, config)
    if getattr(config, "num_experts_per_tok", None):
        _add_experts(writer, config)


def _add_heads(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    size = head_dim or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    _add_rope(writer, rope)


def _add_rope(writer: Any, rope: Mapping[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_latent(writer: Any, config: Any, *, whole_up: bool) -> None:
    """Newer files name the sizes of kept vectors, older ones those of heads alone."""
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if whole_up:
        writer.add_key_length(head_dim)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    _add_rope(writer, config.rope_parameters)
    if config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _add_experts(writer: Any, config: Any) -> None:
    is_sigmoid = config.model_type in ("glm4_moe", "deepseek_v3")
    writer.add_expert_count(getattr(config, "n_routed_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_gating_func(
            gguf.ExpertGatingFuncType.SIGMOID if is_sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
        )
    if getattr(config, "n_group", None) and config.n_group > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if is_sigmoid:
        writer.add_expert_weights_norm(config.norm_topk_prob)


def _gemma2(writer: Any, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _phi3(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)
    rope = config.rope_parameters
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        growth = np.log(config.max_position_embeddings / original) / np.log(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + growth)))
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def _windows_by_layer(writer: Any, config: Any) -> None:
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _cohere2(writer: Any, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_sliding_window(config.sliding_window)


def _granite(writer: Any, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


_OWN: Mapping[str, Callable[[Any, Any], None]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _windows_by_layer,
    "exaone4": _windows_by_layer,
    "cohere2": _cohere2,
    "granite": _granite,
    "granitemoe": _granite,
}


Array = npt.NDArray[np.float32]
Parts = Iterator[tuple[str, Array]]

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SECOND = {"post_attention_layernorm": "post_attention_norm"}
_FAMILY_NAMES: Mapping[str, Mapping[str, str]] = {
    "gemma2": _AROUND,
    "gemma3": _AROUND,
    "olmo2": _AROUND,
    "exaone4": _AROUND,
    "glm4moe": _SECOND,
    "seed_oss": _SECOND,
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
}
_ADDS_ONE = ("gemma", "gemma2", "gemma3")
_NEIGHBOURS = ("granite", "granitemoe", "smollm3")


@dataclass(frozen=True)
class FamilyFile:
    """A family, by the beginning of its class's name, its architecture in GGUF, and options of its configuration.

    Attributes:
        kind: What matrices are stored as; vectors and routers are F32.
        whole_up: What makes keys and values of latent vectors is one matrix, as older converters wrote it.
        num_drafting: Layers behind the last one, which the file has and the model does not use.
    """

    family: str
    architecture: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "F32"
    whole_up: bool = False
    num_drafting: int = 0


def write_family(path: Path, case: FamilyFile) -> Any:
    """Write a random model, and return the oracle with the numbers that the file holds."""
    sizes = {**SIZES, **case.options}
    oracle = eager_model(case.family, sizes, seed=len(repr(case)), model=case.family.removesuffix("Text"))
    with written(path, case.architecture) as writer:
        add_fields(writer, oracle.config, case.architecture, whole_up=case.whole_up, num_drafting=case.num_drafting)
        plain_vocabulary(writer)
        for name, tensor in _tensors(oracle):
            if case.kind != "F32" and tensor.dim() > 1:
                _round(tensor, name, case, oracle.config)
            for stored, array in _transformed(name, tensor.detach().float().numpy(), case, oracle.config):
                plain = array.ndim == 1 or "ffn_gate_inp" in stored or case.kind == "F32"
                kind = gguf.GGMLQuantizationType["F32" if plain else case.kind]
                raw = gguf.quants.quantize(np.ascontiguousarray(array), kind)
                writer.add_tensor(stored, raw, raw_dtype=kind)
        for index in range(case.num_drafting):
            for part in ("attn_q.weight", "nextn.eh_proj.weight"):
                name = f"blk.{oracle.config.num_hidden_layers + index}.{part}"
                writer.add_tensor(name, np.ones((64, 64), np.float32))
    return oracle


def _tensors(oracle: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from oracle.named_parameters()
    yield from ((name, buffer) for name, buffer in oracle.named_buffers() if name.endswith("correction_bias"))


def _round(tensor: torch.Tensor, name: str, case: FamilyFile, config: Any) -> None:
    """Give the oracle the numbers that the file will hold; rounding them again changes nothing."""
    if name.endswith(("mlp.gate.weight", "moe.router.weight")):
        return
    kind = gguf.GGMLQuantizationType[case.kind]

    def rounded(values: torch.Tensor) -> torch.Tensor:
        array = np.ascontiguousarray(values.detach().numpy())
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind))

    with torch.no_grad():
        if name.endswith("kv_b_proj.weight") and not case.whole_up:
            heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            keys.copy_(rounded(keys.mT).mT)
            values.copy_(rounded(values))
        else:
            tensor.copy_(rounded(tensor))


def _transformed(name: str, array: Array, case: FamilyFile, config: Any) -> Parts:
    """Name a tensor as GGUF does; cut, stack, reorder or shift it as the converter of its family does."""
    stem, _, end = name.rpartition(".")
    prefix = f"blk.{name.split('.')[2]}." if name.startswith("model.layers.") else ""
    part = stem.split(".", 3)[3] if prefix else stem
    if end == "e_score_correction_bias":
        yield f"{prefix}exp_probs_b.bias", array
    elif ".experts" in name or "input_linear" in part or (".output_linear" in part and "shared" not in part):
        yield from _experts(f"{part}.{end}", prefix, array)
    elif part == "self_attn.kv_b_proj" and not case.whole_up:
        heads = array.reshape(config.num_attention_heads, -1, array.shape[1])
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        yield f"{prefix}attn_k_b.weight", keys.swapaxes(1, 2)
        yield f"{prefix}attn_v_b.weight", values
    else:
        if case.architecture in _ADDS_ONE and stem.endswith("norm"):
            array = array + 1
        if case.architecture in _NEIGHBOURS and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        names = {**_NAMES, **_FAMILY_NAMES.get(case.architecture, {})}
        yield f"{prefix}{names[part]}.{end}", array


def _experts(part: str, prefix: str, array: Array) -> Parts:
    """Write gates and up projections, which `transformers` has as one, apart."""
    kind = "shexp" if "shared" in part else "exps"
    if "gate_up" in part or "input_linear" in part:
        gate, up = np.split(array, 2, axis=-2)
        yield f"{prefix}ffn_gate_{kind}.weight", gate
        yield f"{prefix}ffn_up_{kind}.weight", up
    else:
        yield f"{prefix}ffn_down_{kind}.weight", array
