"""A GGUF file's metadata of its model, and how a family's become the fields of its `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import ModelConfig
from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.metadata import Metadata
from gpu_worker.quantization.gguf.tensor_types import F16, F32, TensorType

Fields = dict[str, Any]

MAX_HEADS = 1024
"""The most heads that a layer may have."""

DTYPES: Mapping[TensorType, str] = {F32: "float32", F16: "float16"}
"""What models of plain tensors compute in. Quantized weights come from bfloat16 models nearly always."""


class ModelFields(Metadata):
    """The metadata that begin with the file's architecture; a malformed or missing field is a `GGUFError`.

    Attributes:
        tensors: By their names in the file.
        num_layers: Layers of the model; those behind them, which draft, are not counted.
    """

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        own = {name: value for name, value in file.metadata.fields.items() if name.startswith(f"{prefix}.")}
        super().__init__(file.path, {name.removeprefix(f"{prefix}."): value for name, value in own.items()})
        self.file = file
        self.prefix = prefix
        self.tensors = file.tensors
        count = self.integer("block_count", maximum=1024)
        self.num_layers = count - self.integer("nextn_predict_layers", 0, minimum=0, maximum=count - 1)

    def error(self, name: str, problem: str) -> GGUFError:
        """Make the error that names a field by its whole name."""
        return super().error(f"{self.prefix}.{name}", problem)

    def tensor_error(self, names: str, problem: str) -> GGUFError:
        """Make the error that names tensors."""
        return GGUFError(self.file.path, names, problem)

    @cached_property
    def parts(self) -> frozenset[str]:
        """The names that tensors of layers have behind the layer's number."""
        names = (name.split(".", 2) for name in self.tensors if name.startswith("blk."))
        return frozenset(name[2] for name in names if len(name) > 2)

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return not self.parts.isdisjoint(("attn_q.bias", "attn_qkv.bias"))

    @property
    def has_router(self) -> list[bool]:
        """Of each layer, whether it is a mixture."""
        return [f"blk.{layer}.ffn_gate_inp.weight" in self.tensors for layer in range(self.num_layers)]

    @property
    def eps(self) -> float:
        """The small addend of all normalisations, which has one name for either kind; some files have the other's."""
        names = [f"attention.layer_norm_{kind}" for kind in ("rms_epsilon", "epsilon")]
        return self.number(next((name for name in names if name in self), names[0]))

    def by_layer(self, name: str) -> list[int]:
        """Read a number that all layers have, or one for each."""
        value, count = self.fields.get(name), self.num_layers
        if not isinstance(value, list | np.ndarray):
            return [self.integer(name, minimum=0)] * count
        numbers = [int(number) for number in self.numbers(name, len(value))]
        if len(numbers) < count or min(numbers) < 0:
            raise self.error(name, f"has {len(numbers)} numbers; it must have {count}, none of them below 0")
        return numbers[:count]

    def shape_of(self, part: str) -> tuple[int, ...]:
        """Return the shape of a tensor that some layers have."""
        names = (name for name in self.tensors if name.startswith("blk.") and name.endswith(f".{part}"))
        if (name := next(names, None)) is None:
            raise self.tensor_error(f"tensor {part!r}", "is missing in all layers; the metadata call for it")
        return self.tensors[name].shape

    def turning_share(self, head_dim: int) -> float:
        """Return the share of a head's dimensions that turn."""
        # Half a dimension more, so that the product is not rounded below the number.
        return min(1.0, (self.integer("rope.dimension_count", head_dim) + 0.5) / head_dim)

    def attention(self, theta: float | None = 10_000.0) -> Fields:
        """Return heads of keys, their size and, unless None, the base of the rotation, by default `theta`."""
        heads = self.integer("attention.head_count_kv", maximum=MAX_HEADS)
        fields = {"num_key_value_heads": heads, "head_dim": self.integer("attention.key_length")}
        return fields if theta is None else {**fields, "rope_theta": self.number("rope.freq_base", theta)}

    def experts(self, count: str = "num_experts", top_k: str = "num_experts_per_tok") -> Fields:
        """Return how many experts there are, how many a token gets, and their size, by the family's names."""
        return {
            count: self.integer("expert_count"),
            top_k: self.integer("expert_used_count"),
            "moe_intermediate_size": self.integer("expert_feed_forward_length"),
        }

    def state_heads(self) -> tuple[int, int]:
        """Read how many heads states have, and the features of each."""
        num_heads, inner = self.integer("ssm.time_step_rank", maximum=MAX_HEADS), self.integer("ssm.inner_size")
        if inner % num_heads:
            problem = f"is {inner}; it must be a multiple of {self.prefix}.ssm.time_step_rank ({num_heads})"
            raise self.error("ssm.inner_size", problem)
        return num_heads, inner // num_heads


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How a family's metadata become fields, and what its converter does to a model besides.

    Attributes:
        fields: May name in `architectures` the family whose reader reads them, if `ARCHITECTURES` names another.
        finish: Turns the configuration of a checkpoint into that of the file.
    """

    fields: Callable[[ModelFields], Fields]
    finish: Callable[[ModelFields, ModelConfig], ModelConfig] = lambda gguf, config: config


def plain_names(shape: MixtureShape) -> MixtureNames:
    """Return the names that a mixture's tensors have in such files, whatever family it is.

    Their stacks never alternate gates and up projections, even where those that the family's adapters belong to do.
    """
    names = shape.names
    return MixtureNames(has_interleaved_adapters=names.is_interleaved or names.has_interleaved_adapters)


def with_plain_names(config: ModelConfig) -> ModelConfig:
    """Return the model whose mixtures have the names that tensors of such files are given, whatever family it is."""
    layers = tuple(
        replace(layer, feed_forward=replace(layer.feed_forward, names=plain_names(layer.feed_forward)))
        if isinstance(layer.feed_forward, MixtureShape)
        else layer
        for layer in config.layers
    )
    return replace(config, layers=layers)
