"""Reads which layers of a model have a sliding window, where `layer_types` may say so."""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker.models.json_file import JsonFile

_KINDS = {"full_attention", "sliding_attention"}


def read_sliding(file: JsonFile, is_sliding: Callable[[int], bool]) -> tuple[bool, ...]:
    """Return for each layer whether it has a sliding window.

    Args:
        file: The configuration.
        is_sliding: What an absent `layer_types` means of a layer of this number.

    Raises:
        CheckpointError: `layer_types` names other types, or not one for each layer.
    """
    num_layers = file.integer("num_hidden_layers", maximum=1024)
    types = file.texts("layer_types")
    if not types:
        return tuple(is_sliding(layer) for layer in range(num_layers))
    if len(types) != num_layers or set(types) - _KINDS:
        problem = "must name full_attention or sliding_attention for each of the num_hidden_layers layers"
        raise file.error("layer_types", problem)
    return tuple(kind == "sliding_attention" for kind in types)


def read_windows(file: JsonFile, is_sliding: Callable[[int], bool], default: int = 4096) -> tuple[int | None, ...]:
    """Return each layer's window, None where it has none; `default` is what an absent `sliding_window` means."""
    if file.is_null("sliding_window"):
        return (None,) * file.integer("num_hidden_layers", maximum=1024)
    window = file.integer("sliding_window", default)
    return tuple(window if sliding else None for sliding in read_sliding(file, is_sliding))


def all_but_every(count: int) -> Callable[[int], bool]:
    """Return the pattern whose every `count`th layer has no window, beginning with layer `count - 1`."""
    return lambda layer: (layer + 1) % count != 0
