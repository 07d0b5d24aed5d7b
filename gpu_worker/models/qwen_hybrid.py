"""What Qwen's hybrid families share: gated delta nets, gated attention, and normalisations stored less one."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.draft_head import read_mtp
from gpu_worker.models.hybrid_config import read_gated_delta, with_mixers
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_layer_types
from gpu_worker.models.mixture_config import read_num_experts, read_top_k
from kernels.moe import RoutingRule

_LINEAR, _FULL = "linear_attention", "full_attention"


def read_hybrid_decoder(
    file: JsonFile, architecture: str, *, by_key_head: bool, inner_size: str = "intermediate_size"
) -> ModelConfig:
    """Read the configuration, with a gated block in all layers: by default three recurrent ones to one that attends.

    Args:
        file: The configuration.
        architecture: Name of the family.
        by_key_head: As `GatedDeltaShape` has it.
        inner_size: The field of the gated block's size.

    Raises:
        CheckpointError: A field is missing, of the wrong type, or not supported.
    """
    has_bias = file.boolean("attention_bias", False)
    attention = AttentionShape(
        head_norm=HeadNorm.HEADS,
        qkv_bias=has_bias,
        output_bias=has_bias,
        output_gate=True,
    )
    # The head that predicts further tokens is no part of the model.
    names = TensorNames(unused=(r"mtp\..*",))
    block = BlockTraits(norm=NormKind(is_offset=True), names=names)
    traits = FamilyTraits(
        architecture,
        head_dim=256,
        attention=attention,
        block=block,
        inner_size=file.integer(inner_size),
        rotary_share=0.25,
    )
    config = read_decoder(file, traits)
    attends = file.integer("full_attention_interval", 4, maximum=1024)
    types = read_layer_types(file, (_LINEAR, _FULL), lambda layer: _LINEAR if (layer + 1) % attends else _FULL)
    config = with_mixers(config, types, {_LINEAR: read_gated_delta(file, by_key_head=by_key_head)})
    return replace(config, draft_head=read_mtp(file))


def read_shared_mixture(file: JsonFile, *, top_k: int, renormalize: bool) -> MixtureShape:
    """Read a mixture with an expert that all tokens get, weighed by a score of its own.

    Args:
        file: The configuration.
        top_k: What an absent `num_experts_per_tok` means.
        renormalize: The weights of a token's experts add up to one.

    Raises:
        CheckpointError: A field is missing, or a token would get more experts than there are.
    """
    num_experts = read_num_experts(file, "num_experts")
    return MixtureShape(
        num_experts,
        file.integer("moe_intermediate_size"),
        RoutingRule(read_top_k(file, num_experts, top_k), renormalize=renormalize),
        shared_size=file.integer("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
