"""Gemma 4 (text, dense): Gemma 3 with larger heads and shared projections where layers have no window.

Its small models read an embedding of the token in each layer and share keys and values between layers, its mixture has
experts beside the block that all tokens get: these are refused.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.layer_traits import AttentionShape, HeadNorm, LayerTraits
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.block_traits import BlockTraits
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_activation, read_decoder
from gpu_worker.models.families import gemma2
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows
from gpu_worker.models.rope_config import has_ropes_by_type, read_rope
from gpu_worker.models.text_part import text_names, text_part

ARCHITECTURE = "Gemma4ForCausalLM"
ALSO = ("Gemma4ForConditionalGeneration",)
SAMPLE = {"hidden_size_per_layer_input": 0}


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    file = text_part(file)
    _refuse(file)
    length = file.integer("max_position_embeddings", 131072)
    by_type = has_ropes_by_type(file)
    full = RopeParameters(RopeType.PROPORTIONAL, 1e6, length, turning_share=0.25)
    sliding = RopeParameters(RopeType.DEFAULT, 1e4, length)
    traits = FamilyTraits(
        ARCHITECTURE,
        head_dim=256,
        attention=AttentionShape(scale=1.0, head_norm=HeadNorm.HEADS, value_norm=True),
        layer_windows=_windows(file),
        block=BlockTraits(
            names=text_names(replace(gemma2.NAMES, stream_scale="layer_scalar")),
            embedding_scale=file.integer("hidden_size") ** 0.5,
            logit_soft_cap=gemma2.read_soft_cap(file, "final_logit_softcapping", None),
        ),
        activation=read_activation(file, "hidden_activation", "gelu_pytorch_tanh"),
        is_tied=True,
        rope=read_rope(file, "full_attention") if by_type else full,
        max_model_len=length,
    )
    config = replace(
        read_decoder(file, traits), more_ropes=(read_rope(file, "sliding_attention") if by_type else sliding,)
    )
    shares = file.boolean("attention_k_eq_v", False)
    layers = [replace(layer, mixer=_attention(file, index, layer, shares)) for index, layer in enumerate(config.layers)]
    config = replace(config, layers=tuple(layers))
    return replace(config, head_dim=max(config.attention_shape(index).head_dim for index in range(config.num_layers)))


def _attention(file: JsonFile, index: int, layer: LayerTraits, shares: bool) -> AttentionShape:
    """Return a layer's attention; those without a window have sizes of their own, and maybe values that are keys."""
    shape = layer.mixer
    assert isinstance(shape, AttentionShape)
    is_full = shape.sliding_window is None
    shape = replace(shape, rotary=0 if is_full else 1, values_are_keys=shares and is_full)
    overrides = file.nested("per_layer_config")
    if overrides is not None:
        return _overridden(shape, overrides.nested(str(index)) or JsonFile(file.path, {}))
    if not is_full:
        return shape
    num_kv_heads = shape.num_kv_heads
    if shares:
        num_kv_heads = file.integer("num_global_key_value_heads", num_kv_heads, maximum=1024)
    head_dim = file.integer("global_head_dim", 512, minimum=4, maximum=1024)
    return replace(shape, head_dim=head_dim, num_kv_heads=num_kv_heads)


def _overridden(shape: AttentionShape, fields: JsonFile) -> AttentionShape:
    """Return a layer's attention with the sizes that the configuration gives it alone."""
    for name in fields.names() - {"head_dim", "num_key_value_heads"}:
        raise fields.error(name, "is set for one layer; supported for one layer: head_dim, num_key_value_heads")
    head_dim = fields.integer("head_dim", shape.head_dim, minimum=4, maximum=1024)
    return replace(
        shape, head_dim=head_dim, num_kv_heads=fields.integer("num_key_value_heads", shape.num_kv_heads, maximum=1024)
    )


def _windows(file: JsonFile) -> tuple[int | None, ...]:
    """Read the windows; the last layer never has one."""
    return (*read_windows(file, all_but_every(6), 512)[:-1], None)


def _refuse(file: JsonFile) -> None:
    for name, is_set in (
        ("hidden_size_per_layer_input", file.integer("hidden_size_per_layer_input", 256, minimum=0) > 0),
        ("num_kv_shared_layers", file.integer("num_kv_shared_layers", 0, minimum=0) > 0),
        ("enable_moe_block", file.boolean("enable_moe_block", False)),
        ("use_bidirectional_attention", file.text("use_bidirectional_attention", "vision") == "all"),
    ):
        if is_set:
            problem = "is set, which is not supported; served of Gemma 4 are the dense models without it, as the 31B"
            raise file.error(name, problem)
