"""GLM-4.5 and later mixtures: routing by groups with a bias, a shared expert, half of a head's dimensions rotated."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.draft_head import nextn_tensors, read_nextn
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import later_layers, read_grouped_sigmoid, with_silu_mixtures

ARCHITECTURE = "Glm4MoeForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. Layers behind the last one draft, and are no part of the model."""
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(
            qkv_bias=file.boolean("attention_bias", False),
            head_norm=HeadNorm.HEADS if file.boolean("use_qk_norm", False) else HeadNorm.NONE,
        ),
        block=BlockTraits(names=TensorNames(unused=nextn_tensors(file))),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    config = with_silu_mixtures(file, read_decoder(file, traits), read_grouped_sigmoid(file), later_layers(file, 1))
    return replace(config, draft_head=read_nextn(file))
