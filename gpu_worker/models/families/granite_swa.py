"""Granite with windows: sinks in all layers, windows in three of four, and a base of the rotation for each layer."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.rope_scaling import RopeParameters
from gpu_worker.models.config import ModelConfig, read_decoder
from gpu_worker.models.families.granite import granite_traits
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import read_windows

ARCHITECTURE = "GraniteSWAForCausalLM"

_FIELD = "layer_rope_theta"


def read_config(file: JsonFile) -> ModelConfig:
    """Read the configuration."""
    return with_windows(file, read_decoder(file, replace(granite_traits(file, ARCHITECTURE), is_tied=True)))


def with_windows(file: JsonFile, config: ModelConfig) -> ModelConfig:
    """Return a Granite model whose layers have sinks, their window and their rotation.

    Raises:
        CheckpointError: The windows or the bases of the rotation are not given for each layer.
    """
    windows = read_windows(file, lambda layer: layer % 4 != 0, default=128)
    assert config.rope is not None
    thetas = _thetas(file, config.rope)
    bases = list(dict.fromkeys(theta for theta in thetas if theta)) or [config.rope.theta]
    ropes = [replace(config.rope, theta=theta) for theta in bases]

    def changed(layer: LayerTraits, window: int | None, theta: float) -> LayerTraits:
        assert isinstance(layer.mixer, AttentionShape)
        rotary = bases.index(theta) if theta else None
        return replace(layer, mixer=replace(layer.mixer, has_sinks=True, sliding_window=window, rotary=rotary))

    layers = tuple(map(changed, config.layers, windows, thetas))
    return replace(config, layers=layers, rope=ropes[0], more_ropes=tuple(ropes[1:]))


def _thetas(file: JsonFile, rope: RopeParameters) -> list[float]:
    """Read the base of each layer; zero is a layer that does not rotate."""
    count = file.integer("num_hidden_layers", maximum=1024)
    thetas = file.fields.get(_FIELD)
    if thetas is None:
        return [rope.theta] * count
    is_list = isinstance(thetas, list) and all(type(theta) in (int, float) for theta in thetas)
    if not is_list or len(thetas) != count or not all(theta == 0 or 1 < theta <= 1e12 for theta in thetas):
        raise file.error(_FIELD, f"must be 0, or above 1, for each of the num_hidden_layers ({count}) layers")
    return [float(theta) for theta in thetas]
