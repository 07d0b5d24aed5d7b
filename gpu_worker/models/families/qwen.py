"""Qwen 1.5 to 3.6 (text), dense, with experts, and hybrids with gated delta nets."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, read_decoder
from gpu_worker.models.draft_head import read_mtp
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import FULL, read_layer_types, read_optional_windows, read_uniform_windows
from gpu_worker.models.mixture_config import all_layers, read_mixture, sparse_layers, with_silu_mixtures
from gpu_worker.models.recurrent_config import MAX_CONV_WIDTH, with_mixers
from kernels.gated_delta import DeltaSizes


def read_qwen2(file: JsonFile) -> ModelConfig:
    """Read Qwen2 and Qwen2.5: query, key and value biases, and an optional sliding window in some layers."""
    traits = FamilyTraits(attention=AttentionShape(qkv_bias=True), layer_windows=read_optional_windows(file))
    return read_decoder(file, traits)


def read_qwen2_moe(file: JsonFile) -> ModelConfig:
    """Read Qwen1.5-MoE and Qwen2-MoE: small experts, and one that all tokens get, weighed by a score of its own."""
    shape = _read_shared_mixture(file, top_k=4, renormalize=file.boolean("norm_topk_prob", False))
    traits = FamilyTraits(
        attention=AttentionShape(qkv_bias=file.boolean("qkv_bias", True)),
        layer_windows=read_optional_windows(file, is_early=True),
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, sparse_layers(file))


def read_qwen3(file: JsonFile) -> ModelConfig:
    """Read Qwen3 (dense): normalised query and key heads, and an optional sliding window in some layers."""
    traits = FamilyTraits(
        head_dim=128,
        attention=biased(file, AttentionShape(head_norm=HeadNorm.HEADS)),
        layer_windows=read_optional_windows(file),
    )
    return read_decoder(file, traits)


SEEING = "qwen3_vl_moe_text"
"""The text part of Qwen3-VL-MoE, whose published experts are stored transposed."""


def read_qwen3_moe(file: JsonFile) -> ModelConfig:
    """Read Qwen3-MoE: Qwen3 with small experts in place of its feed-forward blocks; a window is one of all layers."""
    windows = read_uniform_windows(file) if file.boolean("use_sliding_window", False) else None
    names = MixtureNames(is_transposed=None if file.text("model_type", "") == SEEING else False)
    counts, renormalize = ("num_experts", "num_local_experts"), file.boolean("norm_topk_prob", False)
    shape = read_mixture(file, counts, 8, "moe_intermediate_size", renormalize=renormalize, names=names)
    traits = FamilyTraits(attention=biased(file, AttentionShape(head_norm=HeadNorm.HEADS)), layer_windows=windows)
    return with_silu_mixtures(file, read_decoder(file, traits), shape, sparse_layers(file))


_LINEAR = "linear_attention"


def _read_hybrid(file: JsonFile, *, by_key_head: bool, inner_size: str = "intermediate_size") -> ModelConfig:
    """Read a hybrid of gated delta nets and gated attention, by default three to one; `inner_size` is a field."""
    attention = biased(file, AttentionShape(head_norm=HeadNorm.HEADS, output_gate=True))
    # The head that predicts further tokens is not part of the model.
    names = TensorNames(unused=(r"mtp\..*",))
    block = BlockTraits(norm=NormKind(is_offset=True), names=names)
    traits = FamilyTraits(
        head_dim=256, attention=attention, block=block, inner_size=file.integer(inner_size), rotary_share=0.25
    )
    config = read_decoder(file, traits)
    attends = file.integer("full_attention_interval", 4, maximum=1024)
    types = read_layer_types(file, (_LINEAR, FULL), lambda layer: _LINEAR if (layer + 1) % attends else FULL)
    config = with_mixers(config, types, {_LINEAR: _read_gated_delta(file, by_key_head=by_key_head)})
    return replace(config, draft_head=read_mtp(file))


def _read_shared_mixture(file: JsonFile, *, top_k: int, renormalize: bool) -> MixtureShape:
    """Read a mixture with a gated shared expert; `top_k` is the default of `num_experts_per_tok`."""
    shape = read_mixture(file, ("num_experts",), top_k, "moe_intermediate_size", renormalize=renormalize)
    return replace(shape, shared_size=file.integer("shared_expert_intermediate_size"), has_shared_gate=True)


def _read_gated_delta(file: JsonFile, *, by_key_head: bool) -> GatedDeltaShape:
    """Read the sizes of gated delta nets, under Qwen's names."""
    num_key_heads = file.integer("linear_num_key_heads", 16, maximum=1024)
    num_value_heads = file.integer("linear_num_value_heads", 32, maximum=1024)
    if num_value_heads % num_key_heads:
        problem = f"is {num_value_heads}; it must be a multiple of linear_num_key_heads ({num_key_heads})"
        raise file.error("linear_num_value_heads", problem)
    activation = file.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        problem = f"is {activation[:80]!r}; the convolutions of recurrent layers are served with 'silu'"
        raise file.error("hidden_act", problem)
    sizes = DeltaSizes(
        num_key_heads,
        num_value_heads,
        file.integer("linear_key_head_dim", 128, maximum=256),
        file.integer("linear_value_head_dim", 128, maximum=1024),
    )
    width = file.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=MAX_CONV_WIDTH)
    return GatedDeltaShape(sizes, width, by_key_head)


def read_qwen3_next(file: JsonFile) -> ModelConfig:
    """Read Qwen3-Next: gated delta nets, gated attention, and small experts with one that all tokens get."""
    config = _read_hybrid(file, by_key_head=True)
    mixture = _read_shared_mixture(file, top_k=10, renormalize=file.boolean("norm_topk_prob", True))
    return with_silu_mixtures(file, config, mixture, sparse_layers(file))


def read_qwen3_5(file: JsonFile) -> ModelConfig:
    """Read Qwen3.5 and 3.6 (dense): three gated delta nets to each layer of gated attention with partial rotation."""
    return _read_hybrid(file, by_key_head=False)


def read_qwen3_5_moe(file: JsonFile) -> ModelConfig:
    """Read Qwen3.5-MoE and 3.6: Qwen3.5 with small experts, and one that all tokens get, in all layers."""
    config = _read_hybrid(file, by_key_head=False, inner_size="moe_intermediate_size")
    return with_silu_mixtures(file, config, _read_shared_mixture(file, top_k=8, renormalize=True), all_layers(file))


FAMILIES = (
    Family("Qwen2ForCausalLM", read_qwen2),
    Family("Qwen2MoeForCausalLM", read_qwen2_moe, defaults={"num_key_value_heads": 16}),
    Family("Qwen3ForCausalLM", read_qwen3),
    Family("Qwen3MoeForCausalLM", read_qwen3_moe, defaults={"num_key_value_heads": 4}),
    Family("Qwen3NextForCausalLM", read_qwen3_next, defaults={"num_key_value_heads": 2}),
    Family("Qwen3_5ForCausalLM", read_qwen3_5, defaults={"num_key_value_heads": 4}),
    Family("Qwen3_5MoeForCausalLM", read_qwen3_5_moe, defaults={"num_key_value_heads": 2}),
)
