"""OLMo 3: OLMo 2 with a window in three layers of four, whose rotation is not scaled."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import ModelConfig, map_attention, read_decoder
from gpu_worker.models.families.olmo2 import olmo_traits
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows
from gpu_worker.models.rope_config import has_ropes_by_type, read_rope

ARCHITECTURE = "Olmo3ForCausalLM"

_THETA = 500_000.0


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    by_type = has_ropes_by_type(file)
    full = read_rope(file, "full_attention" if by_type else None, default_theta=_THETA)
    sliding = read_rope(file, "sliding_attention", default_theta=_THETA) if by_type else _unscaled(full, file)
    traits = replace(
        olmo_traits(file, ARCHITECTURE),
        layer_windows=read_windows(file, all_but_every(4)),
        rope=full,
        max_model_len=file.integer("max_position_embeddings"),
    )
    config = replace(read_decoder(file, traits), more_ropes=(sliding,))
    return map_attention(config, lambda shape: replace(shape, rotary=0 if shape.sliding_window is None else 1))


def _unscaled(rope: RopeParameters, file: JsonFile) -> RopeParameters:
    return RopeParameters(RopeType.DEFAULT, rope.theta, file.integer("max_position_embeddings"))
