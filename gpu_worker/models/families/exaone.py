"""LG's EXAONE 4 and K-EXAONE."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.block_traits import BlockTraits, TensorNames
from gpu_worker.models.config import FamilyTraits, ModelConfig, read_decoder, rotate_windows_only
from gpu_worker.models.families import Family, olmo
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_windows
from gpu_worker.models.mixture_config import mixture_layers, read_grouped_sigmoid, with_silu_mixtures


def read_exaone4(file: JsonFile) -> ModelConfig:
    """Read EXAONE 4: normalisations after blocks, and normalised heads; with windows, only layers with one rotate."""
    traits = FamilyTraits(
        attention=AttentionShape(head_norm=HeadNorm.HEADS),
        layer_windows=read_pattern(file),
        block=BlockTraits(names=olmo.NAMES),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    config = read_decoder(file, traits)
    return config if file.is_null("sliding_window") else rotate_windows_only(config)


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


_NAMES = TensorNames(
    renamed=((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),), unused=(r"mtp\..*",)
)


def read_exaone_moe(file: JsonFile) -> ModelConfig:
    """Read K-EXAONE: EXAONE 4's windows and heads, normalisation before the blocks, and DeepSeek V3's routing."""
    counts = ("num_experts", "num_local_experts")
    shape = read_grouped_sigmoid(file, 1024, counts=counts, shared="num_shared_experts")
    shape = replace(shape, rule=replace(shape.rule, scale=file.number("routed_scaling_factor", 2.5)))
    traits = FamilyTraits(
        attention=AttentionShape(head_norm=HeadNorm.HEADS),
        layer_windows=read_pattern(file),
        block=BlockTraits(names=_NAMES),
        norm_eps=("rms_norm_eps", 1e-5),
    )
    config = read_decoder(file, traits)
    if not file.is_null("sliding_window"):
        config = rotate_windows_only(config)
    return with_silu_mixtures(file, config, shape, mixture_layers(file, 1))


FAMILIES = (
    Family("Exaone4ForCausalLM", read_exaone4, defaults={"num_key_value_heads": 32}),
    Family("ExaoneMoeForCausalLM", read_exaone_moe, defaults={"num_key_value_heads": 32}),
)
