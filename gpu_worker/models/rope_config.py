"""Reads the rotary parameters from `config.json`, in the form of transformers 5 and in the older one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.layers.rotations import QueryGrowth
from gpu_worker.models.json_file import JsonFile

_ORIGINAL = "original_max_position_embeddings"
_MAX_LEN = 1 << 24
# Turns within the trained length between which YaRN's ramp runs: 1 and 32 in all published models.
MIN_TURNS, MAX_TURNS = 1e-6, 1e6
# Its square must be finite; published models have at most 1.
_MAX_MSCALE = 1e6
_ROPES = frozenset({"rope_parameters", "rope_scaling"})
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# All sections of a text token's position are the same in "mrope", which is for images.
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}


def read_rope(file: JsonFile, layer_type: str | None = None, *, default_theta: float = 10000.0) -> RopeParameters:
    """Read `rope_parameters`, of `layer_type` where types differ, or the older `rope_theta`, `rope_scaling`."""
    fields = rope_fields(file, layer_type)
    rope_type = _rope_type(fields)
    theta = fields.optional_number("rope_theta") or file.number("rope_theta", default_theta)
    if theta <= 1:
        raise file.error("rope_theta", f"is {theta:g}; it must be above 1")
    trained = _trained_len(file)
    if rope_type is RopeType.DEFAULT:
        return RopeParameters(rope_type, theta, trained)
    if rope_type is RopeType.PROPORTIONAL:
        return RopeParameters(rope_type, theta, trained, turning_share=fields.number("partial_rotary_factor", 1.0))
    if rope_type in (RopeType.LINEAR, RopeType.DYNAMIC):
        return RopeParameters(rope_type, theta, trained, fields.number("factor"))
    holder = file if _ORIGINAL in file.names() else fields
    original = holder.integer(_ORIGINAL, trained, minimum=2, maximum=_MAX_LEN)
    if rope_type is RopeType.LLAMA3:
        return _read_llama3(fields, theta, original)
    factor = fields.optional_number("factor") or trained / original
    if rope_type is RopeType.LONGROPE:
        return _read_longrope(fields, theta, original, factor)
    return RopeParameters(
        rope_type,
        theta,
        original,
        factor,
        attention_factor=fields.optional_number("attention_factor"),
        beta_fast=_turns(fields, "beta_fast", 32.0),
        beta_slow=_turns(fields, "beta_slow", 1.0),
        mscale=_mscale(fields, "mscale"),
        mscale_all_dim=_mscale(fields, "mscale_all_dim"),
        truncate=fields.boolean("truncate", True),
    )


def with_defaults(file: JsonFile, defaults: Mapping[str, Any]) -> JsonFile:
    """Return a configuration with what its absent fields mean. A rotation that it describes, it describes whole."""
    given = {name: value for name, value in file.fields.items() if value is not None or name not in _ROPES}
    meant = {name: value for name, value in defaults.items() if name not in _ROPES or not given.keys() & _ROPES}
    return file.with_fields({**meant, **given})


def read_rope_of(file: JsonFile, layer_type: str, field: str, theta: float) -> RopeParameters:
    """Read the rotation of one type of layers, whose base has a field of its own in published configurations."""
    if not has_ropes_by_type(file):
        file = JsonFile(file.path, {**file.fields, "rope_theta": file.fields.get(field)})
    return read_rope(file, layer_type, default_theta=theta)


def read_rotary_dim(file: JsonFile, head_dim: int, default: float = 1.0, layer_type: str | None = None) -> int | None:
    """Read how many dimensions of a head rotate, by default the share `default`; None is all."""
    fields = rope_fields(file, layer_type)
    holder = file if "partial_rotary_factor" in file.names() else fields
    factor = holder.number("partial_rotary_factor", default)
    # A factor near the largest float times a head is an infinity, which no integer is.
    rotary_dim = int(head_dim * min(factor, 1.0))
    if factor > 1 or rotary_dim < 2 or rotary_dim % 2:
        problem = f"is {factor:g}; of heads of {head_dim} it must choose an even number of dimensions, at least 2"
        raise holder.error("partial_rotary_factor", problem)
    return None if rotary_dim == head_dim else rotary_dim


def check_rope(file: JsonFile, rope: RopeParameters, rotary_dim: int) -> None:
    """Refuse a rotation that cannot rotate this number of dimensions."""
    for name, divisors in (("short_factor", rope.divisors), ("long_factor", rope.long_divisors)):
        if divisors and len(divisors) != rotary_dim // 2:
            problem = (
                f"has {len(divisors)} numbers; {rotary_dim} dimensions of a head turn, so it must have half as many"
            )
            raise rope_fields(file).error(name, problem)
    if rope.rope_type is RopeType.DYNAMIC and rotary_dim < 4:
        raise rope_fields(file).error("rope_type", "is 'dynamic', which needs at least 4 dimensions of a head to turn")


def read_query_growth(file: JsonFile) -> QueryGrowth | None:
    """Read by how much queries grow with their position, `AttentionShape.query_growth`."""
    fields = rope_fields(file)
    growth = fields.optional_number("llama_4_scaling_beta")
    return None if growth is None else QueryGrowth(growth, fields.integer(_ORIGINAL, maximum=_MAX_LEN))


def max_model_len(file: JsonFile, rope: RopeParameters | None) -> int:
    """Return how many tokens the model reaches, scaling included.

    Llama 3's `max_position_embeddings` is the scaled length already; the others' is not, or may not be. Qwen's models
    of a million tokens attend by chunks behind their first one, within which that is plain attention.
    """
    trained, chunks = _trained_len(file), file.nested("dual_chunk_attention_config")
    if chunks is not None:
        trained = min(trained, chunks.integer(_ORIGINAL, trained))
    if rope is None or rope.rope_type in (RopeType.DEFAULT, RopeType.LLAMA3, RopeType.PROPORTIONAL):
        return trained
    reached = rope.original_max_len * rope.factor
    if reached > _MAX_LEN:
        raise rope_fields(file).error(
            "factor", f"makes a context of {reached:g} tokens; at most {_MAX_LEN} can be served"
        )
    return max(trained, int(reached))


def _trained_len(file: JsonFile) -> int:
    return file.integer("max_position_embeddings", maximum=_MAX_LEN)


def has_ropes_by_type(file: JsonFile) -> bool:
    """Return True if `rope_parameters` differ between types of layers."""
    fields = file.nested("rope_parameters")
    return fields is not None and bool(fields.names() & _LAYER_TYPES)


def rope_fields(file: JsonFile, layer_type: str | None = None) -> JsonFile:
    """Return the object that has a rotation's parameters, empty where there is none; arguments as of `read_rope`."""
    for name in ("rope_scaling", "rope_parameters"):
        fields = file.nested(name)
        if fields is not None and fields.names():
            if not fields.names() & _LAYER_TYPES:
                return fields
            if layer_type is None:
                raise file.error(name, "differs between layer types, which is not supported in this family")
            return fields.nested(layer_type) or JsonFile(file.path, {})
    return JsonFile(file.path, {})


def _rope_type(fields: JsonFile) -> RopeType:
    name = fields.text("rope_type" if "rope_type" in fields.names() else "type", "default")
    name = _OTHER_NAMES.get(name, name)
    try:
        return RopeType(name)
    except ValueError:
        supported = ", ".join(item.value for item in RopeType)
        raise fields.error("rope_type", f"is {name[:80]!r}; supported: {supported}") from None


def _turns(fields: JsonFile, name: str, default: float) -> float:
    turns = fields.number(name, default)
    if not MIN_TURNS <= turns <= MAX_TURNS:
        raise fields.error(name, f"is {turns:g}; it must be from {MIN_TURNS:g} to {MAX_TURNS:g}")
    return turns


def _mscale(fields: JsonFile, name: str) -> float | None:
    value = fields.optional_number(name)
    if value is not None and value > _MAX_MSCALE:
        raise fields.error(name, f"is {value:g}; it must be at most {_MAX_MSCALE:g}")
    return value


def _read_llama3(fields: JsonFile, theta: float, original: int) -> RopeParameters:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low > high:
        raise fields.error("low_freq_factor", f"is {low:g}; it must be at most high_freq_factor ({high:g})")
    return RopeParameters(RopeType.LLAMA3, theta, original, fields.number("factor"), low, high)


def _read_longrope(fields: JsonFile, theta: float, original: int, factor: float) -> RopeParameters:
    short, long = fields.numbers("short_factor"), fields.numbers("long_factor")
    if not short or len(short) != len(long):
        problem = f"has {len(long)} numbers; it must have as many as short_factor, {len(short)}, and at least 1"
        raise fields.error("long_factor", problem)
    return RopeParameters(
        RopeType.LONGROPE,
        theta,
        original,
        factor,
        attention_factor=fields.optional_number("attention_factor"),
        divisors=short,
        long_divisors=long,
    )
