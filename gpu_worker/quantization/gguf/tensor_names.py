"""A GGUF file's tensors under the names that checkpoints of Hugging Face give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from gpu_worker.quantization.gguf.errors import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile, TensorInfo

ROPE_DIVISORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one a pair of dimensions. Part of the configuration; keeps its name."""

_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        ROPE_DIVISORS: ROPE_DIVISORS,
    }
)
_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    }
)
# gpt-oss' second normalisation has the name that other families give to one behind attention.
_GPT_OSS: Mapping[str, str] = MappingProxyType({"post_attention_norm": "post_attention_layernorm"})
# What checkpoints know without `.weight`.
_WHOLE: Mapping[str, str] = MappingProxyType({"attn_sinks.weight": "self_attn.sinks"})
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")


def tensors_by_name(file: GGUFFile) -> dict[str, TensorInfo]:
    """Rename a file's tensors.

    Raises:
        GGUFError: One has a name that no model that we serve has.
    """
    tensors = {}
    layer = {**_LAYER, **_GPT_OSS} if file.metadata.text("general.architecture", "") == "gpt-oss" else _LAYER
    for info in file.tensors.values():
        name = _checkpoint_name(info.name, layer)
        if name is None:
            raise GGUFError(file.path, f"tensor {info.name!r}", "is in no model that can be served")
        tensors[name] = info
    return tensors


def _checkpoint_name(name: str, parts: Mapping[str, str]) -> str | None:
    """Return what a checkpoint calls the tensor, or None when no model that we serve has it."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _MODEL.get(name)
    layer, part, kind = match.groups()
    if (whole := _WHOLE.get(f"{part}.{kind}")) is not None:
        return f"model.layers.{layer}.{whole}"
    return f"model.layers.{layer}.{parts[part]}.{kind}" if part in parts else None
