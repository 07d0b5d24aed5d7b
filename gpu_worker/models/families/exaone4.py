"""EXAONE 4: normalisations after the blocks, normalised heads; where layers have windows, only these rotate."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits
from gpu_worker.models.config import FamilyTraits, ModelConfig, map_attention, read_decoder
from gpu_worker.models.families import olmo2
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows

ARCHITECTURE = "Exaone4ForCausalLM"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    traits = FamilyTraits(
        ARCHITECTURE,
        attention=AttentionShape(head_norm=HeadNorm.HEADS),
        layer_windows=read_pattern(file),
        block=BlockTraits(names=olmo2.NAMES),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    config = read_decoder(file, traits)
    if file.is_null("sliding_window"):
        return config
    return map_attention(config, lambda shape: replace(shape, rotary=None if shape.sliding_window is None else 0))


def read_pattern(file: JsonFile) -> tuple[int | None, ...]:
    """Read the windows. The pattern is a number, or letters of which G is a layer without; then the last has none."""
    pattern = file.fields.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise file.error("sliding_window_pattern", f"is {pattern[:80]!r}; supported: a number, or letters L and G")
        last = file.integer("num_hidden_layers", maximum=1024) - 1
        return read_windows(file, lambda layer: layer != last and pattern[layer % len(pattern)] == "L")
    interval = file.integer("sliding_window_pattern", 4) if not file.is_null("sliding_window") else 1
    return read_windows(file, all_but_every(interval))
