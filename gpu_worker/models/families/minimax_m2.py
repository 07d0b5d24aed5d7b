"""MiniMax M2: sigmoid routing with a bias, heads that turn in part, queries and keys normalised over all heads."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mixture_config import all_layers, read_num_experts, read_top_k, with_silu_mixtures
from kernels.moe import RoutingRule

ARCHITECTURE = "MiniMaxM2ForCausalLM"

_BLOCK = "block_sparse_moe"
_MIXTURE = MixtureNames(
    router=(f"{_BLOCK}.gate", "mlp.gate"),
    experts=(f"{_BLOCK}.experts", "mlp.experts"),
    matrices=("w1", "w3", "w2"),
    choice_bias=f"{_BLOCK}.e_score_correction_bias",
)
_NAMES = TensorNames(renamed=((r"\.mlp\.e_score_correction_bias$", f".{_BLOCK}.e_score_correction_bias"),))


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration. Published checkpoints give the number of dimensions that turn, not their share."""
    num_experts = read_num_experts(file, "num_local_experts")
    head_dim = file.integer("head_dim", 128)
    shape = MixtureShape(
        num_experts,
        file.integer("intermediate_size"),
        RoutingRule(read_top_k(file, num_experts, 8), score="sigmoid", renormalize=True),
        _MIXTURE,
        has_choice_bias=True,
    )
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=128,
        attention=AttentionShape(head_norm=HeadNorm.WHOLE),
        block=BlockTraits(names=_NAMES),
        rotary_share=file.integer("rotary_dim", head_dim) / head_dim,
        rope_theta=5e6,
    )
    return with_silu_mixtures(file, read_decoder(file, traits), shape, all_layers(file))
