"""Hunyuan (mixtures, A13B): the dense model's attention, and experts beside a shared one in every layer."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import ModelConfig, read_decoder
from gpu_worker.models.families.hunyuan_v1_dense import hunyuan_traits
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import check_silu, read_by_layer
from kernels.moe import RoutingRule

ARCHITECTURE = "HunYuanMoEV1ForCausalLM"
SAMPLE = {"moe_topk": 2, "moe_intermediate_size": 512}

_MIXTURE = MixtureNames(router=("mlp.gate.wg",), shared="mlp.shared_mlp")


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. Published ones give the numbers of experts for each layer.

    Raises:
        CheckpointError: Layers share keys, or experts are of another size than `intermediate_size`.
    """
    if file.boolean("use_cla", False):
        raise file.error("use_cla", "is true; supported: false, layers with keys and values of their own")
    check_silu(file)
    inner_size = file.integer("intermediate_size")
    if set(read_by_layer(file, "moe_intermediate_size", inner_size)) != {inner_size}:
        raise file.error("moe_intermediate_size", "differs from intermediate_size; supported: the same for all experts")
    config = read_decoder(file, hunyuan_traits(file, ARCHITECTURE))
    numbers = (
        read_by_layer(file, name, default)
        for name, default in (("num_experts", None), ("moe_topk", 1), ("num_shared_expert", 1))
    )
    layers = [
        replace(layer, feed_forward=_mixture(file, inner_size, *counts))
        for layer, counts in zip(config.layers, zip(*numbers, strict=True), strict=True)
    ]
    return replace(config, layers=tuple(layers))


def _mixture(file: JsonFile, inner_size: int, num_experts: int, top_k: int, num_shared: int) -> MixtureShape:
    if top_k > num_experts:
        raise file.error("moe_topk", f"is {top_k}; there are {num_experts} experts")
    rule = RoutingRule(top_k, renormalize=True)
    return MixtureShape(num_experts, inner_size, rule, _MIXTURE, shared_size=inner_size * num_shared)
