"""Hunyuan (mixtures, A13B): the dense model's attention, and experts beside a shared one in every layer."""

from __future__ import annotations

from gpu_worker.layers.mixture_shape import MixtureNames, MixtureShape
from gpu_worker.models.config import ModelConfig, read_decoder
from gpu_worker.models.families.hunyuan_v1_dense import hunyuan_traits
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "HunYuanMoEV1ForCausalLM"
SAMPLE = {"moe_topk": 2, "moe_intermediate_size": 512}

_MIXTURE = MixtureNames(router=("mlp.gate.wg",), shared="mlp.shared_mlp")
# What published checkpoints give for each layer, all alike.
_PER_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration.

    Raises:
        CheckpointError: Layers share keys, or differ in their experts.
    """
    if file.boolean("use_cla", False):
        raise file.error("use_cla", "is true; supported: false, layers with keys and values of their own")
    file = JsonFile(file.path, {**file.fields, **{name: _alike(file, name) for name in _PER_LAYER}})
    num_experts, inner_size = read_num_experts(file, "num_experts"), file.integer("intermediate_size")
    if file.integer("moe_intermediate_size", inner_size) != inner_size:
        raise file.error("moe_intermediate_size", "differs from intermediate_size; supported: the same for all experts")
    shape = MixtureShape(
        num_experts,
        inner_size,
        RoutingRule(read_top_k(file, num_experts, 1, name="moe_topk"), renormalize=True),
        _MIXTURE,
        shared_size=inner_size * file.integer("num_shared_expert", 1),
    )
    return with_silu_mixtures(file, read_decoder(file, hunyuan_traits(file, ARCHITECTURE)), shape, all_layers(file))


def _alike(file: JsonFile, name: str) -> object:
    """Return a number that may be given once, or for each layer."""
    value = file.fields.get(name)
    if not isinstance(value, list):
        return value
    if not value or any(item != value[0] for item in value):
        raise file.error(name, "differs between layers; supported: the same in all")
    return value[0]
