"""Reads which layers of a model are of which kind, and which have a sliding window."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gpu_worker.models.json_file import JsonFile

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of attention layers, as most configurations call them."""


def read_layer_types(
    file: JsonFile, kinds: Collection[str], default: Callable[[int], str], field: str = "layer_types"
) -> tuple[str, ...]:
    """Return the kind, one of `kinds`, of each layer from `field`, or else `default` of its index."""
    num_layers = file.integer("num_hidden_layers", maximum=1024)
    types = file.texts(field) or tuple(map(default, range(num_layers)))
    if len(types) != num_layers or set(types) - set(kinds):
        problem = f"must name {' or '.join(kinds)} for each of the num_hidden_layers ({num_layers}) layers"
        raise file.error(field, problem)
    return types


def read_uniform_windows(file: JsonFile, default: int | None = None) -> tuple[int, ...] | None:
    """Return the one window of every layer; None if `sliding_window` is null, or absent without default."""
    if file.is_null("sliding_window") or (default is None and "sliding_window" not in file.names()):
        return None
    return (file.integer("sliding_window", default),) * file.integer("num_hidden_layers", maximum=1024)


def read_windows(file: JsonFile, is_sliding: Callable[[int], bool], default: int = 4096) -> tuple[int | None, ...]:
    """Return each layer's window or None, by `layer_types` or else `is_sliding`, of `sliding_window` tokens."""
    if file.is_null("sliding_window"):
        return (None,) * file.integer("num_hidden_layers", maximum=1024)
    window = file.integer("sliding_window", default)
    types = read_layer_types(file, (FULL, SLIDING), lambda layer: SLIDING if is_sliding(layer) else FULL)
    return tuple(window if kind == SLIDING else None for kind in types)


def read_optional_windows(file: JsonFile, *, is_early: bool = False) -> tuple[int | None, ...] | None:
    """Return each layer's window as Qwen has it: with `use_sliding_window`, from `max_window_layers` on.

    With `is_early`, in every other layer before that, beginning with the first, as Qwen2-MoE has it.
    """
    if not file.boolean("use_sliding_window", False):
        return None
    first = file.integer("max_window_layers", 28, minimum=0)
    if is_early:
        return read_windows(file, lambda layer: layer % 2 == 0 and layer < first)
    return read_windows(file, lambda layer: layer >= first)


def all_but_every(count: int) -> Callable[[int], bool]:
    """Return the pattern whose every `count`th layer has no window, beginning with layer `count - 1`."""
    return lambda layer: (layer + 1) % count != 0


def read_rotating_layers(file: JsonFile) -> tuple[bool, ...]:
    """Return which layers rotate: those with 1 in `no_rope_layers`, else all but every `no_rope_layer_interval`th."""
    if file.fields.get("no_rope_layers"):
        return read_layer_flags(file, "no_rope_layers")
    rotates = all_but_every(file.integer("no_rope_layer_interval", 4))
    return tuple(map(rotates, range(file.integer("num_hidden_layers", maximum=1024))))


def read_layer_flags(file: JsonFile, field: str) -> tuple[bool, ...]:
    """Read a field with 0 or 1 for each layer."""
    flags, num_layers = file.fields[field], file.integer("num_hidden_layers", maximum=1024)
    if not isinstance(flags, list) or len(flags) != num_layers or not all(flag in (0, 1) for flag in flags):
        raise file.error(field, f"must be 0 or 1 for each of the num_hidden_layers ({num_layers}) layers")
    return tuple(map(bool, flags))
