"""What translations of GGUF metadata into the fields of `config.json` have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.rope_scaling import RopeParameters
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.gguf_rope import reached_len, read_gguf_rope
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.tensor_types import F16, F32, TensorType

Fields = dict[str, Any]

MAX_HEADS = 1024
"""The most heads that a layer may have."""

DTYPES: Mapping[TensorType, str] = MappingProxyType({F32: "float32", F16: "float16"})
"""What models of plain tensors compute in. Quantized weights come from bfloat16 models nearly always."""


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How a family's metadata become fields, and what its converter does to a model besides.

    Attributes:
        fields: Those of its own, by the file and its architecture. `architectures` names the family whose reader reads
            them, where it is another than `ARCHITECTURES` says.
        finish: Turns the configuration of a checkpoint into that of the file.
    """

    fields: Callable[[GGUFFile, str], Fields]
    finish: Callable[[GGUFFile, str, ModelConfig], ModelConfig] = lambda file, prefix, config: config


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


def by_layer(file: GGUFFile, field: str, default: int | None = None) -> list[int]:
    """Read a number that all layers have, or one for each.

    Raises:
        GGUFError: There are fewer than layers.
    """
    metadata, count = file.metadata, num_layers(file, field.partition(".")[0])
    value = metadata.fields.get(field, default)
    if not isinstance(value, list | np.ndarray):
        return [metadata.integer(field, default, minimum=0)] * count
    numbers = [int(number) for number in metadata.numbers(field, len(value))]
    if len(numbers) < count or min(numbers) < 0:
        raise metadata.error(field, f"has {len(numbers)} numbers; it must have {count}, none of them below 0")
    return numbers[:count]


def state_heads(file: GGUFFile, prefix: str) -> tuple[int, int]:
    """Read how many heads states have, and the features of each.

    Raises:
        GGUFError: The features do not make whole heads.
    """
    metadata, heads, size = file.metadata, f"{prefix}.ssm.time_step_rank", f"{prefix}.ssm.inner_size"
    num_heads, inner = metadata.integer(heads, maximum=MAX_HEADS), metadata.integer(size)
    if inner % num_heads:
        raise metadata.error(size, f"is {inner}; it must be a multiple of {heads} ({num_heads})")
    return num_heads, inner // num_heads


def layer_parts(file: GGUFFile) -> frozenset[str]:
    """Return the names that tensors of layers have behind the layer's number."""
    return frozenset(name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.") and name.count(".") > 1)


def has_qkv_bias(parts: frozenset[str]) -> bool:
    """Whether queries, keys and values have biases, by what `layer_parts` returned."""
    return not parts.isdisjoint(("attn_q.bias", "attn_qkv.bias"))


def with_rope(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    """Return the model with the rotation that the file names.

    Raises:
        GGUFError: No layer attends.
    """
    attention = next((layer.mixer for layer in config.layers if hasattr(layer.mixer, "rotary_dim")), None)
    if attention is None:
        field = f"{prefix}.block_count"
        raise file.metadata.error(
            field, f"is {config.num_layers}, and none of these layers attends; copy the file again"
        )
    rotary_dim = getattr(attention, "rotary_dim", None) or config.head_dim
    return with_this_rope(file, prefix, config, read_gguf_rope(file, prefix, rotary_dim, config.max_model_len))


def with_this_rope(file: GGUFFile, prefix: str, config: ModelConfig, rope: RopeParameters) -> ModelConfig:
    """Return the model with a rotation, and the length that it reaches.

    Raises:
        GGUFError: It is more than can be served.
    """
    try:
        return replace(config, rope=rope, max_model_len=reached_len(rope, config.max_model_len))
    except ValueError as error:
        raise file.metadata.error(f"{prefix}.rope.scaling.factor", str(error)) from None


def finish_mixtures(file: GGUFFile, prefix: str, config: ModelConfig) -> ModelConfig:
    """Return the model with the names and the rotation that files with mixtures have, whatever family it is."""
    return with_rope(file, prefix, with_plain_names(config))


def with_plain_names(config: ModelConfig) -> ModelConfig:
    """Return the model whose mixtures have the names that tensors of such files are given, whatever family it is."""
    layers = tuple(
        replace(layer, feed_forward=replace(layer.feed_forward, names=MixtureNames()))
        if isinstance(layer.feed_forward, MixtureShape)
        else layer
        for layer in config.layers
    )
    return replace(config, layers=layers)
