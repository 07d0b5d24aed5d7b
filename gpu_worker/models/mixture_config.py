"""Reads what checkpoints' configurations say about mixtures of experts, in the ways that families share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import ModelConfig, read_activation
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_layer_types
from kernels.activation import Activation
from kernels.moe import RoutingRule
from kernels.moe.reference import Score

_MAX_EXPERTS = 1 << 12
# Bounds of a per-layer list: experts, or features of one.
_MAX_INNER = 1 << 20


def with_mixtures(config: ModelConfig, shape: MixtureShape, layers: Collection[int]) -> ModelConfig:
    """Return a model whose feed-forward blocks are mixtures in the layers of these numbers."""
    traits = [
        replace(layer, feed_forward=shape) if index in layers else layer for index, layer in enumerate(config.layers)
    ]
    return replace(config, layers=tuple(traits))


def with_silu_mixtures(
    file: JsonFile, config: ModelConfig, shape: MixtureShape, layers: Collection[int]
) -> ModelConfig:
    """Do the same for experts with SiLU, the only activation served."""
    check_silu(file)
    return with_mixtures(config, shape, layers)


def check_silu(file: JsonFile) -> None:
    """Refuse experts with another activation than SiLU."""
    if read_activation(file) is not Activation.SILU:
        problem = f"is {file.text('hidden_act')[:80]!r}; experts of this family are served with 'silu'"
        raise file.error("hidden_act", problem)


def read_by_layer(file: JsonFile, name: str, default: int | None = None) -> tuple[int, ...]:
    """Read a number above 0 of each layer, which the configuration gives once for all, or as a list."""
    num_layers = file.integer("num_hidden_layers", maximum=1024)
    if not isinstance(file.fields.get(name), list):
        return (file.integer(name, default, maximum=_MAX_INNER),) * num_layers
    numbers = file.integers(name)
    if len(numbers) != num_layers or not all(0 < number <= _MAX_INNER for number in numbers):
        problem = (
            f"must be a number from 1 to {_MAX_INNER}, or one for each of the num_hidden_layers ({num_layers}) layers"
        )
        raise file.error(name, problem)
    return numbers


def read_num_experts(file: JsonFile, *names: str) -> int:
    """Read how many experts a mixture has, from the first of these fields that is present."""
    return file.integer(next((name for name in names if name in file.names()), names[0]), maximum=_MAX_EXPERTS)


def read_top_k(
    file: JsonFile, num_experts: int, default: int | None = None, *, name: str = "num_experts_per_tok"
) -> int:
    """Read how many of the experts a token gets, from the field `name`."""
    top_k = file.integer(name, default, maximum=_MAX_EXPERTS)
    if top_k > num_experts:
        raise file.error(name, f"is {top_k}; there are {num_experts} experts")
    return top_k


def all_layers(file: JsonFile) -> frozenset[int]:
    """Return the numbers of all layers."""
    return frozenset(range(file.integer("num_hidden_layers", maximum=1024)))


def sparse_layers(file: JsonFile) -> frozenset[int]:
    """Read which layers are mixtures as Qwen has it: every `decoder_sparse_step`-th, without `mlp_only_layers`."""
    step, dense = file.integer("decoder_sparse_step", 1), file.integers("mlp_only_layers")
    return frozenset(layer for layer in all_layers(file) if (layer + 1) % step == 0 and layer not in dense)


def later_layers(file: JsonFile, default: int, field: str = "first_k_dense_replace") -> frozenset[int]:
    """Read which layers are mixtures where `field` counts the first ones, which are not."""
    first = file.integer(field, default, minimum=0)
    return frozenset(layer for layer in all_layers(file) if layer >= first)


def mixture_layers(file: JsonFile, default: int) -> frozenset[int]:
    """Read which layers are mixtures, from `mlp_layer_types`, or else as `later_layers` does."""
    if "mlp_layer_types" not in file.names():
        return later_layers(file, default)
    types = read_layer_types(file, ("dense", "sparse"), lambda _layer: "dense", "mlp_layer_types")
    return frozenset(layer for layer, kind in enumerate(types) if kind == "sparse")


def read_mixture(
    file: JsonFile,
    counts: Sequence[str],
    top_k: int,
    size: str = "intermediate_size",
    default_size: int | None = None,
    *,
    renormalize: bool = False,
    score: Score = "softmax",
    **more: Any,
) -> MixtureShape:
    """Read a mixture whose rule has no groups; `counts` are fields as of `read_num_experts`, `size` that of an expert.

    `top_k` and `default_size` are what absent fields mean; the rest is of the rule and of `MixtureShape`.
    """
    num_experts = read_num_experts(file, *counts)
    rule = RoutingRule(read_top_k(file, num_experts, top_k), score=score, renormalize=renormalize)
    return MixtureShape(num_experts, file.integer(size, default_size), rule, **more)


def read_groups(file: JsonFile, num_experts: int, top_k: int, default: int | None = None) -> tuple[int, int]:
    """Read into how many groups experts are divided, and from how many groups a token gets experts."""
    num_groups, top_k_groups = file.integer("n_group", default), file.integer("topk_group", default)
    if num_experts % num_groups:
        raise file.error("n_group", f"is {num_groups}; it must divide the number of experts ({num_experts})")
    if top_k_groups > num_groups:
        raise file.error("topk_group", f"is {top_k_groups}; there are {num_groups} groups (n_group)")
    if top_k > (room := num_experts // num_groups * top_k_groups):
        raise file.error("num_experts_per_tok", f"is {top_k}; the groups that a token chooses have {room} experts")
    return num_groups, top_k_groups


def grouped_sigmoid_rule(file: JsonFile, num_experts: int) -> RoutingRule:
    """Read the routing rule of DeepSeek-V3 and GLM: sigmoids, chosen with a bias from the best groups."""
    top_k = read_top_k(file, num_experts, 8)
    num_groups, top_k_groups = read_groups(file, num_experts, top_k, 1)
    return RoutingRule(
        top_k,
        score="sigmoid",
        renormalize=file.boolean("norm_topk_prob", True),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        group_score="top2",
        scale=file.number("routed_scaling_factor", 1.0),
    )


def read_grouped_sigmoid(
    file: JsonFile,
    expert_size: int | None = None,
    *,
    counts: Sequence[str] = ("n_routed_experts", "num_local_experts"),
    shared: str = "n_shared_experts",
) -> MixtureShape:
    """Read the mixture of DeepSeek-V3 and GLM; `counts` and `shared` are fields that count the experts of each kind."""
    num_experts = read_num_experts(file, *counts)
    inner = file.integer("moe_intermediate_size", expert_size)
    return MixtureShape(
        num_experts,
        inner,
        grouped_sigmoid_rule(file, num_experts),
        MixtureNames(shared="mlp.shared_experts"),
        has_choice_bias=True,
        shared_size=inner * file.integer(shared, 1, minimum=0),
    )
