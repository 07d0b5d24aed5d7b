"""DeepSeek V3, V3.1, R1 and Kimi K2: latent attention, and routing by groups with a bias behind the first layers."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig
from gpu_worker.models.draft_head import nextn_tensors, read_nextn
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.latent_config import read_latent_decoder
from gpu_worker.models.layer_types import read_layer_types
from gpu_worker.models.mixture_config import later_layers, read_grouped_sigmoid, with_silu_mixtures

ARCHITECTURE = "DeepseekV3ForCausalLM"
# What `transformers` 5 calls the layers of Kimi K2.5 where it saves them; published checkpoints have the usual name.
_RENAMED = ((r"^model\.blocks\.", "model.layers."),)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. Layers behind the last one draft, and are no part of the model."""
    return read_latent_mixtures(file, ARCHITECTURE)


def read_latent_mixtures(file: JsonFile, architecture: str) -> ModelConfig:
    """Read a decoder with latent attention whose mixtures are DeepSeek V3's."""
    names = TensorNames(renamed=_RENAMED, unused=nextn_tensors(file))
    traits = FamilyTraits(architecture, block=BlockTraits(names=names))
    config = read_latent_decoder(file, traits, is_interleaved=file.boolean("rope_interleave", True))
    config = with_silu_mixtures(file, config, read_grouped_sigmoid(file), mixture_layers(file, 3))
    return replace(config, draft_head=read_nextn(file))


def mixture_layers(file: JsonFile, default: int) -> frozenset[int]:
    """Read which layers are mixtures: `mlp_layer_types` says it, or else the first ones are not."""
    if "mlp_layer_types" not in file.names():
        return later_layers(file, default)
    types = read_layer_types(file, ("dense", "sparse"), lambda _layer: "dense", "mlp_layer_types")
    return frozenset(layer for layer, kind in enumerate(types) if kind == "sparse")
