"""DeepSeek V2 and V2-Lite: attention by latent vectors, and mixtures behind the first layers."""

from __future__ import annotations

from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.latent_config import read_latent_decoder
from gpu_worker.models.mixture_config import later_layers, read_groups, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "DeepseekV2ForCausalLM"

NAMES = MixtureNames(shared="mlp.shared_experts")


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    num_experts = read_num_experts(file, "n_routed_experts", "num_experts")
    inner = file.integer("moe_intermediate_size")
    shape = MixtureShape(
        num_experts,
        inner,
        _read_rule(file, num_experts),
        NAMES,
        shared_size=inner * file.integer("n_shared_experts", 2, minimum=0),
    )
    config = read_latent_decoder(file, FamilyTraits(ARCHITECTURE), is_interleaved=True)
    return with_silu_mixtures(file, config, shape, later_layers(file, 0))


def _read_rule(file: JsonFile, num_experts: int) -> RoutingRule:
    """Read the rule: the best experts of all, or those of the groups whose best expert is best."""
    if file.boolean("norm_topk_prob", False):
        raise file.error("norm_topk_prob", "is true; weights of DeepSeek V2's experts are not normalised")
    top_k, scale = read_top_k(file, num_experts), file.number("routed_scaling_factor", 1.0)
    method = file.text("topk_method", "greedy")
    if method == "greedy":
        return RoutingRule(top_k, scale=scale)
    if method != "group_limited_greedy":
        raise file.error("topk_method", f"is {method[:80]!r}; supported: 'greedy', 'group_limited_greedy'")
    num_groups, top_k_groups = read_groups(file, num_experts, top_k)
    return RoutingRule(top_k, num_groups=num_groups, top_k_groups=top_k_groups, scale=scale)
