"""Baidu's ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, read_decoder
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule


def read_ernie4_5(file: JsonFile) -> ModelConfig:
    """Read ERNIE 4.5 (dense): Llama with an interleaved rotation."""
    return read_decoder(file, ernie_traits(file, head_dim=128))


def ernie_traits(file: JsonFile, head_dim: int | None = None) -> FamilyTraits:
    """Return the traits that ERNIE's models share."""
    return FamilyTraits(
        head_dim=head_dim,
        attention=biased(file, AttentionShape(interleaved=True), field="use_bias"),
        mlp_bias=file.boolean("use_bias", False),
        norm_eps=("rms_norm_eps", 1e-5),
        is_tied=True,
        rope_theta=500_000.0,
    )


_MIXTURE = MixtureNames(
    choice_bias="mlp.moe_statics.e_score_correction_bias", is_choice_bias_row=True, shared="mlp.shared_experts"
)


def read_ernie4_5_moe(file: JsonFile) -> ModelConfig:
    """Read ERNIE 4.5 (mixtures): shared experts, and a bias for the choice alone, behind the first layer."""
    file.require("use_bias", False, "as in all published checkpoints")
    num_experts = read_num_experts(file, "moe_num_experts", "num_experts")
    top_k = "moe_k" if "moe_k" in file.names() else "num_experts_per_tok"
    inner_size = file.integer("moe_intermediate_size", 1536)
    shape = MixtureShape(
        num_experts,
        inner_size,
        RoutingRule(read_top_k(file, num_experts, 6, name=top_k), renormalize=True),
        _MIXTURE,
        has_choice_bias=True,
        shared_size=inner_size * file.integer("moe_num_shared_experts", 2, minimum=0),
    )
    traits = ernie_traits(file)
    names = TensorNames(unused=(r"model\.mtp_.*",))
    config = read_decoder(file, replace(traits, block=replace(traits.block, names=names)))
    return with_silu_mixtures(file, config, shape, _mixture_layers(file))


def _mixture_layers(file: JsonFile) -> frozenset[int]:
    step, first = file.integer("moe_layer_interval", 1), file.integer("moe_layer_start_index", 1, minimum=0)
    last = file.fields.get("moe_layer_end_index")
    end = max(all_layers(file)) if last in (None, -1) else file.integer("moe_layer_end_index", minimum=0)
    return frozenset(layer for layer in all_layers(file) if (layer + 1) % step == 0 and first <= layer <= end)


FAMILIES = (
    Family("Ernie4_5ForCausalLM", read_ernie4_5, also=("Ernie4_5_ForCausalLM",), defaults={"num_key_value_heads": 2}),
    Family("Ernie4_5_MoeForCausalLM", read_ernie4_5_moe, {"moe_num_experts": 16}, defaults={"num_key_value_heads": 4}),
)
