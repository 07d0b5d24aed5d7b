"""GPT-NeoX, Pythia and their like: parallel blocks with a LayerNorm each, matrices that go by heads."""

from __future__ import annotations

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import BlockTraits, NormKind, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.json_file import JsonFile

ARCHITECTURE = "GPTNeoXForCausalLM"

_NAMES = TensorNames(
    qkv=("query_key_value",),
    renamed=(
        (r"^gpt_neox\.", "model."),
        (r"^model\.embed_in\.", "model.embed_tokens."),
        (r"^embed_out\.", "lm_head."),
        (r"^model\.final_layer_norm\.", "model.norm."),
        (r"\.attention\.", ".self_attn."),
        (r"\.dense\.", ".o_proj."),
        (r"\.dense_h_to_4h\.", ".up_proj."),
        (r"\.dense_4h_to_h\.", ".down_proj."),
    ),
    # Masks and frequencies, which old checkpoints hold.
    unused=(r".*\.self_attn\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    bias = file.boolean("attention_bias", True)
    traits = FamilyTraits(
        ARCHITECTURE,
        shares_kv_heads=False,
        attention=AttentionShape(qkv_bias=bias, output_bias=bias, by_head=True),
        is_gated=False,
        mlp_bias=True,
        block=BlockTraits(
            norm=NormKind(is_centered=True, has_bias=True),
            names=_NAMES,
            is_parallel=file.boolean("use_parallel_residual", True),
        ),
        activation=read_activation(file, default="gelu"),
        norm_eps=("layer_norm_eps", 1e-5),
        # Older checkpoints have names of their own for both.
        rotary_share=file.number("rotary_pct", 0.25),
        rope_theta=file.number("rotary_emb_base", 10000.0),
    )
    return read_decoder(file, traits)
