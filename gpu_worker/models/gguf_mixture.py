"""What a GGUF file's metadata say about mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.quantization.gguf.file import GGUFFile
from kernels.moe import SILU, GatedActivation, RoutingRule, clamped_swiglu
from kernels.moe.routing_rule import Score

_MAX_EXPERTS = 1 << 12


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the format knows by the architecture alone."""

    renormalizes: bool = False
    score: Score = "softmax"
    activation: GatedActivation = field(default_factory=lambda: SILU)
    jitter: float = 0.0


_KINDS = {
    "llama": _Kind(renormalizes=True),
    "qwen2moe": _Kind(),
    "qwen3moe": _Kind(renormalizes=True),
    "olmoe": _Kind(),
    "granitemoe": _Kind(score="softmax_after_topk"),
    "glm4moe": _Kind(score="sigmoid"),
    "deepseek2": _Kind(),
    "dots1": _Kind(score="sigmoid"),
    "ernie4_5-moe": _Kind(renormalizes=True),
    "exaone-moe": _Kind(renormalizes=True, score="sigmoid"),
    "hunyuan-moe": _Kind(renormalizes=True),
    "mellum": _Kind(renormalizes=True),
    "minimax-m2": _Kind(renormalizes=True, score="sigmoid"),
    "phimoe": _Kind(score="sparse_mixer", jitter=0.01),
    "gpt-oss": _Kind(score="softmax_after_topk", activation=clamped_swiglu(1.702, 7.0)),
}
# What llama.cpp numbers them.
_SIGMOID = 2
_SCORES: Mapping[int, Score] = MappingProxyType({1: "softmax", _SIGMOID: "sigmoid"})


def read_gguf_mixture(file: GGUFFile, prefix: str, inner_size: int) -> MixtureShape | None:
    """Read the sizes and options of a file's mixtures; None where it has none.

    Args:
        file: The file.
        prefix: Its architecture.
        inner_size: Features between the matrices of an expert, where the file does not say.

    Raises:
        GGUFError: The file's architecture is not one whose routing is known, or its numbers make no sense.
    """
    metadata, tensors = file.metadata, file.tensors
    counts = f"{prefix}.expert_count"
    num_experts = metadata.integer(counts, 0, minimum=0, maximum=_MAX_EXPERTS)
    if num_experts == 0:
        return None
    if prefix not in _KINDS:
        raise metadata.error(counts, f"is {num_experts}; experts are supported in {', '.join(_KINDS)}")
    top_k = metadata.integer(f"{prefix}.expert_used_count")
    if top_k > num_experts:
        raise metadata.error(f"{prefix}.expert_used_count", f"is {top_k}; there are {num_experts} experts")
    kind = _KINDS[prefix]
    layers = mixture_layers(file)
    first = f"blk.{min(layers, default=0)}"
    shared = tensors.get(f"{first}.ffn_gate_shexp.weight")
    return MixtureShape(
        num_experts,
        metadata.integer(f"{prefix}.expert_feed_forward_length", inner_size),
        _read_rule(file, prefix, num_experts, top_k),
        activation=kind.activation,
        has_choice_bias=f"{first}.exp_probs_b.bias" in tensors,
        has_router_bias=f"{first}.ffn_gate_inp.bias" in tensors,
        has_expert_biases=f"{first}.ffn_gate_exps.bias" in tensors,
        shared_size=0 if shared is None else shared.shape[0],
        has_shared_gate=f"{first}.ffn_gate_inp_shexp.weight" in tensors,
    )


def _read_rule(file: GGUFFile, prefix: str, num_experts: int, top_k: int) -> RoutingRule:
    """Read the rule of routing: the file may name the scores, groups, and what happens to weights."""
    metadata, kind = file.metadata, _KINDS[prefix]
    function = f"{prefix}.expert_gating_func"
    number = metadata.integer(function, 0, minimum=0)
    if prefix == "deepseek2" and not number and any(name.endswith(".exp_probs_b.bias") for name in file.tensors):
        # Converters do not say of all of V3's kin that they have what V2 has not.
        number = _SIGMOID
    if number not in _SCORES and number:
        raise metadata.error(function, f"is {number}; supported: 1 (softmax) and 2 (sigmoid)")
    score = _SCORES.get(number, kind.score) if kind.score in _SCORES.values() else kind.score
    groups, chosen = f"{prefix}.expert_group_count", f"{prefix}.expert_group_used_count"
    num_groups = metadata.integer(groups, 1, maximum=_MAX_EXPERTS)
    top_k_groups = metadata.integer(chosen, num_groups, maximum=_MAX_EXPERTS)
    if num_experts % num_groups:
        raise metadata.error(groups, f"is {num_groups}; it must divide {prefix}.expert_count ({num_experts})")
    if top_k_groups > num_groups or top_k > num_experts // num_groups * top_k_groups:
        problem = f"is {top_k_groups} of {num_groups} groups; they must hold the {top_k} experts that a token gets"
        raise metadata.error(chosen, problem)
    return RoutingRule(
        top_k,
        score=score,
        renormalize=metadata.boolean(f"{prefix}.expert_weights_norm", kind.renormalizes),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        group_score="top2" if score == "sigmoid" else "max",
        scale=metadata.number(f"{prefix}.expert_weights_scale", 1.0),
        jitter=kind.jitter,
    )


def mixture_layers(file: GGUFFile) -> frozenset[int]:
    """Return the numbers of the layers that have a router."""
    names = (name.split(".") for name in file.tensors if name.endswith(".ffn_gate_inp.weight"))
    return frozenset(int(parts[1]) for parts in names if parts[1].isdecimal())
