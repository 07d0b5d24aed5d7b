"""StableLM 2 and its like: LayerNorm, heads that turn in part, and parallel blocks in some models."""

from __future__ import annotations

from gpu_worker.layers.layer_traits import AttentionShape
from gpu_worker.models.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "StableLmForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration.

    Raises:
        CheckpointError: Each head has a normalisation of its own, as in StableLM 2 12B.
    """
    if file.boolean("qk_layernorm", False):
        raise file.error("qk_layernorm", "is true, as in StableLM 2 12B; supported: false, as in the other sizes")
    is_parallel = file.boolean("use_parallel_residual", False)
    names = TensorNames(before_feed_forward=None) if is_parallel else TensorNames()
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=file.boolean("use_qkv_bias", False)),
        block=BlockTraits(norm=NormKind(is_centered=True, has_bias=True), names=names, is_parallel=is_parallel),
        norm_eps=("layer_norm_eps", 1e-5),
        rotary_share=0.25,
    )
    return read_decoder(file, traits)
