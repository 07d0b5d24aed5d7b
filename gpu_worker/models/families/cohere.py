"""Cohere's models: Command R, R+, R7B and A, and Cohere 2 with experts."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.mlp import GatedShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, read_decoder, rotate_windows_only
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows
from gpu_worker.models.mixture_config import mixture_layers, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule


def read_cohere(file: JsonFile) -> ModelConfig:
    """Read Command R (Cohere): blocks side by side, LayerNorm without bias, neighbouring dimensions turn together.

    Command R+ normalises each head of queries and keys besides.
    """
    traits = replace(cohere_traits(file), rope_theta=500_000.0)
    if traits.attention is not None and file.boolean("use_qk_norm", False):
        traits = replace(traits, attention=replace(traits.attention, head_norm=HeadNorm.APART))
    return read_decoder(file, traits)


def cohere_traits(file: JsonFile) -> FamilyTraits:
    """Return the traits that Cohere's first and second generation share."""
    return FamilyTraits(
        attention=biased(file, AttentionShape(interleaved=True)),
        block=BlockTraits(
            norm=NormKind(is_centered=True),
            names=TensorNames(before_feed_forward=None),
            is_parallel=True,
            logit_scale=file.number("logit_scale", 0.0625),
        ),
        norm_eps=("layer_norm_eps", 1e-5),
        is_tied=True,
    )


def read_cohere2(file: JsonFile) -> ModelConfig:
    """Read Command R7B and Command A (Cohere 2): only layers with a window, three of four, rotate."""
    windows = read_windows(file, all_but_every(file.integer("sliding_window_pattern", 4)))
    return rotate_windows_only(read_decoder(file, replace(cohere_traits(file), layer_windows=windows)))


_DENSE_PERIOD, _DENSE_SIZE = "prefix_dense_sliding_window_pattern", "prefix_dense_intermediate_size"
_COMBINED, _CHOICE = "shared_expert_combination_strategy", "expert_selection_fn"


def read_cohere2_moe(file: JsonFile) -> ModelConfig:
    """Read Cohere 2 with experts: windows and parallel blocks; the first layers are dense and may all rotate."""
    traits = replace(cohere_traits(file), head_dim=128, layer_windows=_windows(file))
    if "rms_norm_eps" in file.names():
        traits = replace(traits, norm_eps=("rms_norm_eps", 1e-6), block=replace(traits.block, norm=NormKind()))
    config = read_decoder(file, traits)
    sparse, dense_period = mixture_layers(file, 0), file.integer(_DENSE_PERIOD, 1)
    dense_size = file.integer(_DENSE_SIZE, config.intermediate_size)

    def changed(index: int, layer: LayerTraits) -> LayerTraits:
        assert isinstance(layer.mixer, AttentionShape)
        assert isinstance(layer.feed_forward, GatedShape)
        turns = layer.mixer.sliding_window is not None or (dense_period == 1 and index not in sparse)
        block = replace(layer.feed_forward, inner_size=dense_size)
        return replace(layer, mixer=replace(layer.mixer, rotary=0 if turns else None), feed_forward=block)

    config = replace(config, layers=tuple(changed(index, layer) for index, layer in enumerate(config.layers)))
    return with_silu_mixtures(file, config, _mixture(file, config.intermediate_size), sparse)


def _mixture(file: JsonFile, inner_size: int) -> MixtureShape:
    num_experts, num_shared = read_num_experts(file, "num_experts"), file.integer("num_shared_experts", 0, minimum=0)
    top_k, score = read_top_k(file, num_experts, 2), file.text(_CHOICE, "softmax")
    if score not in ("softmax", "sigmoid"):
        raise file.error(_CHOICE, f"is {score[:80]!r}; supported: 'softmax', 'sigmoid'")
    combined = file.text(_COMBINED, "average")
    if combined not in ("average", "sum"):
        raise file.error(_COMBINED, f"is {combined[:80]!r}; supported: 'average', 'sum'")
    scale = 0.5 if num_shared and combined == "average" else 1.0
    if score == "softmax":
        rule = RoutingRule(top_k, score="softmax_after_topk", scale=scale)
    else:
        rule = RoutingRule(top_k, score="sigmoid", renormalize=file.boolean("norm_topk_prob", True), scale=scale)
    return MixtureShape(
        num_experts,
        inner_size,
        rule,
        MixtureNames(shared="mlp.shared_experts"),
        shared_size=inner_size * num_shared,
        shared_scale=scale,
    )


def _windows(file: JsonFile) -> tuple[int | None, ...]:
    """Read the windows: the pattern begins anew behind the dense layers, which have one of their own."""
    num_dense = file.integer("first_k_dense_replace", 0, minimum=0)
    slides = all_but_every(file.integer("sliding_window_pattern", 4))
    dense_slides = all_but_every(file.integer(_DENSE_PERIOD, 1))
    return read_windows(file, lambda layer: dense_slides(layer) if layer < num_dense else slides(layer - num_dense))


FAMILIES = (
    Family("CohereForCausalLM", read_cohere),
    Family("Cohere2ForCausalLM", read_cohere2),
    Family("Cohere2MoeForCausalLM", read_cohere2_moe),
)
