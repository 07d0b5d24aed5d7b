"""Falcon-H1: attention and Mamba-2 side by side in every layer, and factors nearly everywhere."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.attention_beside_mamba2 import AttentionBesideMamba2Shape
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.layers.gated_mlp import GatedShape
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.mamba2 import Mamba2Shape, OutputNorm
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.mamba2_config import Mamba2Fields, read_mamba2

ARCHITECTURE = "FalconH1ForCausalLM"
SAMPLE = {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_state": 64, "key_multiplier": 0.5}

_NAMES = TensorNames(
    before_feed_forward="pre_ff_layernorm",
    renamed=((r"\.feed_forward\.", ".mlp."), (r"^model\.final_layernorm\.", "model.norm.")),
)
_NORM, _NORM_FIRST = "mamba_rms_norm", "mamba_norm_before_gate"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    block = BlockTraits(
        names=_NAMES,
        embedding_scale=file.number("embedding_multiplier", 1.0),
        logit_scale=file.number("lm_head_multiplier", 1.0),
    )
    has_bias = file.boolean("attention_bias", False)
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(qkv_bias=has_bias, output_bias=has_bias),
        mlp_bias=file.boolean("mlp_bias", False),
        norm_eps=("rms_norm_eps", 1e-5),
        block=block,
    )
    config, mamba2 = read_decoder(file, traits), _read_mamba2(file)
    gate_scale, down_scale = _factors(file, "mlp_multipliers", 2)

    def with_both(layer: LayerTraits) -> LayerTraits:
        attention, feed_forward = layer.mixer, layer.feed_forward
        assert isinstance(attention, AttentionShape)
        assert isinstance(feed_forward, GatedShape)
        mixer = AttentionBesideMamba2Shape(_scaled(file, attention), mamba2)
        return LayerTraits(mixer, replace(feed_forward, gate_scale=gate_scale, down_scale=down_scale))

    return replace(config, layers=tuple(map(with_both, config.layers)))


def _read_mamba2(file: JsonFile) -> Mamba2Shape:
    norm = OutputNorm.NONE
    if file.boolean(_NORM, False):
        norm = OutputNorm.BEFORE_GATE if file.boolean(_NORM_FIRST, True) else OutputNorm.AFTER_GATE
    shape = read_mamba2(file, Mamba2Fields(inner_size="mamba_d_ssm", output_bias="projectors_bias"), norm)
    before = file.number("ssm_in_multiplier", 1.0)
    if before != 1 and shape.has_input_bias:
        raise file.error("ssm_in_multiplier", f"is {before:g}; it must be 1 where mamba_proj_bias is true")
    gates, values, inputs, outputs, steps = (before * factor for factor in _factors(file, "ssm_multipliers", 5))
    scales = (gates, values, inputs, outputs, steps)
    return replace(shape, input_scales=scales, output_scale=file.number("ssm_out_multiplier", 1.0))


def _scaled(file: JsonFile, shape: AttentionShape) -> AttentionShape:
    """Return attention whose factors are in its scale of scores, and in that of its results.

    What multiplies its inputs multiplies queries, keys and values: scores twice, and results once.
    """
    before, keys = file.number("attention_in_multiplier", 1.0), file.number("key_multiplier", 1.0)
    if before != 1 and shape.qkv_bias:
        raise file.error("attention_in_multiplier", f"is {before:g}; it must be 1 where attention_bias is true")
    after = before * file.number("attention_out_multiplier", 1.0)
    factor = before * before * keys
    return replace(shape, scale=None if factor == 1 else shape.head_dim**-0.5 * factor, output_scale=after)


def _factors(file: JsonFile, name: str, count: int) -> tuple[float, ...]:
    factors = file.numbers(name) or (1.0,) * count
    if len(factors) != count:
        raise file.error(name, f"has {len(factors)} numbers; it must have {count}")
    return factors
