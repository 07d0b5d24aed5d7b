"""Nomic Embed (1 and 1.5): BERT's blocks with gates, without biases, whose tokens turn."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.models.config import FamilyTraits, ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rotary_encoder import POST_NORM_NAMES, post_norm_block, read_rotary_encoder

ARCHITECTURE = "NomicBertModel"

# Fields of published configurations, by the names that most families have for them.
_FIELDS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "n_positions",
    "rope_theta": "rotary_emb_base",
}
# Options of the published code that no dense checkpoint uses, and what they are there.
_ABSENT = ("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved", "causal")
_BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
_GATED = "swiglu"
_NAMES = replace(
    POST_NORM_NAMES,
    renamed=(
        *POST_NORM_NAMES.renamed,
        (r"\.mlp\.fc11\.", ".mlp.up_proj."),
        (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    ),
)


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration, in the names of published ones or of `transformers`.

    Raises:
        CheckpointError: The model has experts, as Nomic Embed 2, or another option that its dense sisters have not.
    """
    if "n_embd" in file.names():
        file = _translated(file)
    traits = FamilyTraits(
        ARCHITECTURE,
        shares_kv_heads=False,
        block=post_norm_block(_NAMES, file.integer("type_vocab_size", 2)),
        norm_eps=("layer_norm_eps", 1e-12),
        rope_theta=1000.0,
    )
    return read_rotary_encoder(file, traits)


def _translated(file: JsonFile) -> JsonFile:
    """Return a published configuration in the names of `transformers`."""
    if file.integer("moe_every_n_layers", 0, minimum=0):
        raise file.error("moe_every_n_layers", "is set; supported: Nomic Embed without experts (1, 1.5)")
    for name in (*_ABSENT, *_BIASES):
        if file.boolean(name, name in _BIASES):
            raise file.error(name, "is true; supported: false")
    if (kind := file.text("activation_function", "gelu")) != _GATED:
        raise file.error("activation_function", f"is {kind[:80]!r}; supported: {_GATED!r}")
    if file.number("rotary_emb_fraction", 1.0) != 1:
        raise file.error("rotary_emb_fraction", "is not 1; supported: heads that turn whole")
    if "rotary_scaling_factor" in file.names():
        raise file.error("rotary_scaling_factor", "is set; supported: null, a rotation without scaling")
    ours = {name: file.fields.get(theirs) for name, theirs in _FIELDS.items()}
    return JsonFile(file.path, {**file.fields, **ours, "hidden_act": "silu"})
