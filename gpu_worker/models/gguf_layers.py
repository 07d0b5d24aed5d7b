"""What a GGUF file's metadata say about attention in each of its layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpu_worker.layers.attention import AttentionShape, HeadNorm
from gpu_worker.layers.layer import FeedForwardShape, LayerTraits
from gpu_worker.layers.query_growth import QueryGrowth
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import windowed
from gpu_worker.models.gguf_family import WINDOWED, GGUFFamily
from gpu_worker.quantization.gguf.errors import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile


def num_layers(file: GGUFFile, prefix: str) -> int:
    """Read how many layers there are; those behind them, which draft, are not counted.

    Raises:
        GGUFError: There would be none.
    """
    count = file.metadata.integer(f"{prefix}.block_count", maximum=1024)
    return count - file.metadata.integer(f"{prefix}.nextn_predict_layers", 0, minimum=0, maximum=count - 1)


def read_eps(file: GGUFFile, prefix: str) -> float:
    """Read the small addend of all normalisations, which has one name for either kind; some files have the other's.

    Raises:
        GGUFError: The file has neither.
    """
    fields = [f"{prefix}.attention.layer_norm_{name}" for name in ("rms_epsilon", "epsilon")]
    return file.metadata.number(next((field for field in fields if field in file.metadata), fields[0]))


def read_kv_heads(file: GGUFFile, prefix: str, num_heads: int) -> int:
    """Read how many key heads all layers have: one number, or the same for each.

    Raises:
        GGUFError: Layers differ, or the query heads cannot share them.
    """
    metadata, field = file.metadata, f"{prefix}.attention.head_count_kv"
    value = metadata.fields.get(field)
    if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu" and (value == value[0]).all():
        num_kv_heads = int(value[0])
    else:
        num_kv_heads = metadata.integer(field, num_heads, maximum=1024)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        problem = f"is {num_kv_heads}; it must divide {prefix}.attention.head_count ({num_heads})"
        raise metadata.error(field, problem)
    return num_kv_heads


def read_head_dim(file: GGUFFile, prefix: str, hidden_size: int, num_heads: int) -> int:
    """Read the size of a head, of keys and of values.

    Raises:
        GGUFError: It cannot be, or values have another one.
    """
    metadata, field = file.metadata, f"{prefix}.attention.key_length"
    if field not in metadata and hidden_size % num_heads:
        problem = f"is {hidden_size}; it must be a multiple of {prefix}.attention.head_count ({num_heads})"
        raise metadata.error(f"{prefix}.embedding_length", problem)
    head_dim = metadata.integer(field, max(1, hidden_size // num_heads), minimum=4, maximum=1024)
    if head_dim % 2:
        raise metadata.error(field, f"is {head_dim}; rotary embeddings need an even number")
    values = f"{prefix}.attention.value_length"
    if metadata.integer(values, head_dim) != head_dim:
        raise metadata.error(values, f"is {metadata.integer(values)}; supported: the size of a key, {head_dim}")
    return head_dim


def read_rotary_dim(file: GGUFFile, prefix: str, family: GGUFFamily, head_dim: int) -> int:
    """Read how many dimensions of a head turn.

    Raises:
        GGUFError: The family does not have so many.
    """
    metadata, field = file.metadata, f"{prefix}.rope.dimension_count"
    rotary_dim = metadata.integer(field, head_dim)
    if rotary_dim == head_dim:
        return rotary_dim
    if not family.turns_in_part:
        raise metadata.error(field, f"is {rotary_dim}; supported: the size of a key, {head_dim}")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise metadata.error(field, f"is {rotary_dim}; it must be an even number up to the size of a key, {head_dim}")
    return rotary_dim


def read_attention(
    file: GGUFFile, prefix: str, family: GGUFFamily, sizes: tuple[int, int, int], rotary_dim: int
) -> AttentionShape:
    """Read what the attention of all layers has in common; `sizes` are query heads, key heads, and a head's size."""
    metadata, tensors = file.metadata, file.tensors
    num_heads, num_kv_heads, head_dim = sizes
    norm = tensors.get("blk.0.attn_q_norm.weight")
    if norm is not None and len(norm.shape) > 1:
        problem = f"has shape {list(norm.shape)}; supported: the same normalisation for all heads, or one over all"
        raise GGUFError(file.path, f"tensor {norm.name!r}", problem)
    cap = f"{prefix}.attn_logit_softcapping"
    return AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        scale=_read_scale(file, prefix, family, num_heads),
        soft_cap=metadata.number(cap) if cap in metadata else None,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        interleaved=family.interleaved,
        head_norm=HeadNorm.NONE if norm is None else HeadNorm.WHOLE if norm.shape != (head_dim,) else family.head_norm,
        has_sinks="blk.0.attn_sinks.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        query_growth=_read_growth(file, prefix),
    )


def read_layers(
    file: GGUFFile, prefix: str, family: GGUFFamily, attention: AttentionShape, feed_forward: FeedForwardShape
) -> tuple[LayerTraits, ...]:
    """Read the layers: which have a window, and how each rotates.

    Raises:
        GGUFError: The file names a window, which the family does not have, or not one pattern for all layers.
    """
    windows = _read_windows(file, prefix, family)
    has_windows = any(window is not None for window in windows)

    def rotary(index: int, window: int | None) -> int | None:
        if family.still_period is not None and (index + 1) % family.still_period == 0:
            return None
        if has_windows and window is None and family.only_windows_turn:
            return None
        return 1 if has_windows and window is not None and family.has_plain_windows else 0

    return tuple(
        replace(layer, mixer=replace(attention, sliding_window=window, rotary=rotary(index, window)))
        for index, (layer, window) in enumerate(zip(windowed(attention, feed_forward, windows), windows, strict=True))
    )


def read_window_ropes(
    file: GGUFFile, prefix: str, family: GGUFFamily, rope: RopeParameters, layers: tuple[LayerTraits, ...]
) -> tuple[RopeParameters, ...]:
    """Read the rotation of layers with a window, where it is another one; `rope` is that of the others.

    Raises:
        GGUFError: Its numbers make no sense.
    """
    if not any(isinstance(layer.mixer, AttentionShape) and layer.mixer.rotary == 1 for layer in layers):
        return ()
    field = f"{prefix}.rope.freq_base_swa"
    theta = file.metadata.number(field, family.window_theta or rope.theta)
    if theta <= 1:
        raise file.metadata.error(field, f"is {theta:g}; it must be above 1")
    return (RopeParameters(RopeType.DEFAULT, theta, rope.original_max_len),)


def _read_scale(file: GGUFFile, prefix: str, family: GGUFFamily, num_heads: int) -> float | None:
    metadata, field = file.metadata, f"{prefix}.attention.scale"
    if field in metadata:
        return metadata.number(field)
    if family.derived_scale_layers == num_layers(file, prefix):
        # The format has no field for it: the largest Gemma of a generation is known by the number of its layers.
        return float((metadata.integer(f"{prefix}.embedding_length") // num_heads) ** -0.5)
    return None


def _read_growth(file: GGUFFile, prefix: str) -> QueryGrowth | None:
    """Read by how much queries grow with their position, from the length of the first training on."""
    metadata, field = file.metadata, f"{prefix}.attention.temperature_scale"
    if field not in metadata:
        return None
    return QueryGrowth(metadata.number(field), metadata.integer(f"{prefix}.rope.scaling.original_context_length"))


def _read_windows(file: GGUFFile, prefix: str, family: GGUFFamily) -> tuple[int | None, ...]:
    metadata, field = file.metadata, f"{prefix}.attention.sliding_window"
    count = num_layers(file, prefix)
    # Converters write zero where a model that could have a window has none.
    window = metadata.integer(field, 0, minimum=0)
    if window == 0:
        return (None,) * count
    if family.window_period is None:
        raise metadata.error(field, f"is set; supported: in files of architecture {WINDOWED}")
    return tuple(window if slides else None for slides in _read_pattern(file, prefix, family.window_period, count))


def _read_pattern(file: GGUFFile, prefix: str, default: int, count: int) -> list[bool]:
    """Read which layers have the window: the file may name a period, or say it of each layer."""
    metadata, field = file.metadata, f"{prefix}.attention.sliding_window_pattern"
    if isinstance(metadata.fields.get(field), list | np.ndarray):
        return [bool(value) for value in metadata.numbers(field, count)]
    period = metadata.integer(field, default)
    return [period == 1 or (layer + 1) % period != 0 for layer in range(count)]
