"""Meta's Llama 4 (text)."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.mlp import GatedShape
from gpu_worker.layers.rotations import QueryGrowth
from gpu_worker.models.config import FamilyTraits, ModelConfig, biased, map_attention, read_decoder, without_rotation
from gpu_worker.models.families import Family
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_layer_types, read_rotating_layers
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from gpu_worker.models.rope_config import read_rope
from kernels.moe import RoutingRule

_KINDS = ("chunked_attention", "full_attention")
_NAMES = TensorNames(renamed=((r"\.feed_forward\.", ".mlp."),))
_MIXTURE = MixtureNames(router=("mlp.router",), is_transposed=True)


def read_llama4(file: JsonFile) -> ModelConfig:
    """Read Llama 4: chunks in layers that rotate, growing queries in those that do not, and one expert a token."""
    # Lengths of queries and keys are made one behind the rotation, which also undoes what it multiplies them by.
    is_normalised = file.boolean("use_qk_norm", True)
    rope = read_rope(file)
    traits = FamilyTraits(
        head_dim=128,
        attention=biased(file, AttentionShape(interleaved=True)),
        block=BlockTraits(names=_NAMES),
        norm_eps=("rms_norm_eps", 1e-5),
        rope=replace(rope, attention_factor=1.0) if is_normalised else rope,
        max_model_len=file.integer("max_position_embeddings", 1 << 17),
    )
    config = _with_kinds(file, read_decoder(file, traits))
    if is_normalised:
        config = map_attention(config, _normalised)
    growth = _read_growth(file)
    config = map_attention(config, lambda shape: shape if shape.rotary == 0 else replace(shape, query_growth=growth))
    inner_size = file.integer("intermediate_size_mlp", 16384)
    dense = [replace(layer, feed_forward=GatedShape(inner_size)) for layer in config.layers]
    config = replace(config, layers=tuple(dense), intermediate_size=max(inner_size, config.intermediate_size))
    return with_silu_mixtures(file, config, _read_mixture(file), _mixture_layers(file))


def _with_kinds(file: JsonFile, config: ModelConfig) -> ModelConfig:
    """Return the model with chunks in its layers of that kind, which are those that rotate where nothing is said."""
    rotates = read_rotating_layers(file)
    config = without_rotation(config, rotates)
    if file.is_null("attention_chunk_size"):
        return config
    chunk_size = file.integer("attention_chunk_size", 8192)
    kinds = iter(read_layer_types(file, _KINDS, lambda layer: _KINDS[not rotates[layer]]))
    return map_attention(
        config, lambda shape: replace(shape, chunk_size=chunk_size) if next(kinds) == _KINDS[0] else shape
    )


def _normalised(shape: AttentionShape) -> AttentionShape:
    return shape if shape.rotary is None else replace(shape, head_norm=HeadNorm.UNWEIGHTED)


def _read_growth(file: JsonFile) -> QueryGrowth | None:
    """Read by how much queries of layers without rotation grow; published checkpoints have a number for a truth."""
    name = "attn_temperature_tuning"
    is_tuned = file.fields.get(name, True)
    if not isinstance(is_tuned, bool | int):
        raise file.error(name, f"is {str(is_tuned)[:80]!r}; it must be true or false")
    if not is_tuned:
        return None
    return QueryGrowth(file.number("attn_scale", 0.1), file.integer("floor_scale", 8192), 1)


def _read_mixture(file: JsonFile) -> MixtureShape:
    num_experts = read_num_experts(file, "num_local_experts")
    top_k = read_top_k(file, num_experts, 1)
    if top_k > 1:
        problem = f"is {top_k}; supported: 1, as in all published checkpoints, whose weight is in the expert's input"
        raise file.error("num_experts_per_tok", problem)
    inner_size = file.integer("intermediate_size", 8192)
    rule = RoutingRule(top_k, score="sigmoid")
    return MixtureShape(num_experts, inner_size, rule, _MIXTURE, weighs_inputs=True, shared_size=inner_size)


def _mixture_layers(file: JsonFile) -> frozenset[int]:
    if "moe_layers" in file.names():
        return frozenset(file.integers("moe_layers"))
    step = file.integer("interleave_moe_layer_step", 1)
    return frozenset(layer for layer in all_layers(file) if (layer + 1) % step == 0)


FAMILIES = (
    Family(
        "Llama4ForCausalLM",
        read_llama4,
        {"intermediate_size_mlp": 512, "num_experts_per_tok": 1},
        defaults={"num_key_value_heads": 8, "rope_theta": 5e5},
    ),
)
