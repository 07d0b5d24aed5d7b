"""StableLM 2 and its like: LayerNorm, heads that turn in part; the 12B model: parallel blocks and normalised heads."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "StableLmForCausalLM"

_NORMS_OF_HEADS = ((r"\.([qk])_layernorm\.norms\.", r".\1_norm."),)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    is_parallel = file.boolean("use_parallel_residual", False)
    names = TensorNames(
        before_feed_forward=None if is_parallel else TensorNames().before_feed_forward, renamed=_NORMS_OF_HEADS
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(
            qkv_bias=file.boolean("use_qkv_bias", False),
            head_norm=HeadNorm.APART if file.boolean("qk_layernorm", False) else HeadNorm.NONE,
        ),
        block=BlockTraits(norm=NormKind(is_centered=True, has_bias=True), names=names, is_parallel=is_parallel),
        norm_eps=("layer_norm_eps", 1e-5),
        rotary_share=0.25,
    )
    return read_decoder(file, traits)
