"""A GGUF file's metadata of its model, and how a family's become the fields of its `config.json`.

Reads the rotary parameters from a GGUF file's metadata.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.rope_config import MAX_TURNS, MIN_TURNS
from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.metadata import Metadata
from gpu_worker.quantization.gguf.tensor_names import ROPE_DIVISORS, ROPE_LONG_DIVISORS, ROPE_SHORT_DIVISORS
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


_MAX_LEN = 1 << 24
# What the logarithm's multiplier is multiplied by: converters of DeepSeek's models write a tenth of it.
_GROWTHS: Mapping[str, float] = {"deepseek2": 10.0, "mistral3": 1.0}
# By how much Phi-3.5-MoE's rotation multiplies queries and keys, of which its files give another number.
_AMPLITUDES: Mapping[str, float] = {"phimoe": 1.243163121016122}
# Dimensions whose frequency is divided by so much do not turn.
_STILL = 1e20


def read_gguf_rope(gguf: ModelFields, head_dim: int, context_length: int) -> RopeParameters:
    """Read the rotation of `head_dim` dimensions: plain, linear, YaRN, or by stored divisors (Llama 3's, LongRoPE)."""
    scaling = "rope.scaling"
    theta = gguf.number("rope.freq_base", 10_000.0)
    if theta <= 1:
        raise gguf.error("rope.freq_base", f"is {theta:g}; it must be above 1")
    if ROPE_LONG_DIVISORS in gguf.tensors:
        return _read_longrope(gguf, head_dim, theta, context_length)
    divisors = _divisors(gguf, ROPE_DIVISORS, head_dim)
    # What older files call linear scaling.
    linear = gguf.number("rope.scale_linear", 1.0)
    kind = gguf.text(f"{scaling}.type", "none" if linear == 1 else "linear")
    if kind == "none":
        return RopeParameters(RopeType.DEFAULT, theta, context_length, divisors=divisors)
    if kind not in ("linear", "yarn") or divisors:
        problem = f"is {kind[:80]!r}; supported: none, linear and yarn, those two without {ROPE_DIVISORS}"
        raise gguf.error(f"{scaling}.type", problem)
    original = gguf.integer(f"{scaling}.original_context_length", context_length, maximum=_MAX_LEN)
    factor = gguf.number(f"{scaling}.factor", linear)
    if kind == "linear":
        return RopeParameters(RopeType.LINEAR, theta, original, factor)
    yarn = RopeParameters(
        RopeType.YARN,
        theta,
        original,
        factor,
        beta_fast=_turns(gguf, f"{scaling}.yarn_beta_fast", 32.0),
        beta_slow=_turns(gguf, f"{scaling}.yarn_beta_slow", 1.0),
        truncate=gguf.prefix != "gpt-oss",
    )
    return _with_amplitude(gguf, yarn)


def _with_amplitude(gguf: ModelFields, yarn: RopeParameters) -> RopeParameters:
    """Return YaRN's rotation with what the file says that it multiplies queries and keys by."""
    scaling = "rope.scaling"
    growth = f"{scaling}.yarn_log_multiplier"
    if gguf.prefix in _GROWTHS and (gguf.prefix == "deepseek2" or gguf.is_other_than(growth, 0.0)):
        number = _GROWTHS[gguf.prefix] * gguf.number(growth)
        return replace(yarn, mscale=number, mscale_all_dim=number)
    for name, supported in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if gguf.is_other_than(f"{scaling}.{name}", supported):
            raise gguf.error(f"{scaling}.{name}", "is set, which is not supported")
    amplitude = gguf.number(f"{scaling}.attn_factor", 1.0) * gguf.number(f"{scaling}.yarn_attn_factor", 1.0)
    return replace(yarn, attention_factor=amplitude * (1.0 + 0.1 * math.log(max(yarn.factor, 1.0))))


def proportional_share(gguf: ModelFields, head_dim: int) -> float:
    """Return the share of a head's dimensions that rotate: the divisors of the others are beyond all measure."""
    divisors = _divisors(gguf, ROPE_DIVISORS, head_dim)
    turning = sum(1 for divisor in divisors if divisor == 1)
    if any(divisor != 1 for divisor in divisors[:turning]) or any(divisor < _STILL for divisor in divisors[turning:]):
        problem = "holds other numbers than ones and, behind them, such that nothing turns by"
        raise gguf.tensor_error(f"tensor {ROPE_DIVISORS!r}", problem)
    return turning * 2 / head_dim if divisors else 1.0


def with_rope(gguf: ModelFields, config: ModelConfig) -> ModelConfig:
    """Return the model with the rotation that the file names."""
    attention = next((layer.mixer for layer in config.layers if hasattr(layer.mixer, "rotary_dim")), None)
    if attention is None:
        problem = f"is {config.num_layers}, and none of these layers attends; copy the file again"
        raise gguf.error("block_count", problem)
    rotary_dim = getattr(attention, "rotary_dim", None) or config.head_dim
    return with_this_rope(gguf, config, read_gguf_rope(gguf, rotary_dim, config.max_model_len))


def with_this_rope(gguf: ModelFields, config: ModelConfig, rope: RopeParameters) -> ModelConfig:
    """Return the model with a rotation, and the length that it reaches."""
    reached = max(config.max_model_len, rope.original_max_len * rope.factor)
    if reached > _MAX_LEN:
        problem = f"makes a context of {reached:g} tokens; at most {_MAX_LEN} can be served"
        raise gguf.error("rope.scaling.factor", problem)
    return replace(config, rope=rope, max_model_len=int(reached))


def _read_longrope(gguf: ModelFields, head_dim: int, theta: float, context_length: int) -> RopeParameters:
    """Read Phi-3's LongRoPE, which two tensors of divisors tell; the field of the scaling's type does not."""
    scaling = "rope.scaling"
    original = gguf.integer(f"{scaling}.original_context_length", maximum=context_length)
    amplitude = _AMPLITUDES.get(gguf.prefix, gguf.optional_number("rope.scaling.attn_factor"))
    short, long = (_divisors(gguf, name, head_dim) for name in (ROPE_SHORT_DIVISORS, ROPE_LONG_DIVISORS))
    if not short:
        raise gguf.tensor_error(f"tensor {ROPE_SHORT_DIVISORS!r}", f"is missing; {ROPE_LONG_DIVISORS!r} is there")
    return RopeParameters(
        RopeType.LONGROPE,
        theta,
        original,
        context_length / original,
        attention_factor=amplitude,
        divisors=short,
        long_divisors=long,
    )


def _turns(gguf: ModelFields, field: str, default: float) -> float:
    turns = gguf.number(field, default)
    if not MIN_TURNS <= turns <= MAX_TURNS:
        raise gguf.error(field, f"is {turns:g}; it must be from {MIN_TURNS:g} to {MAX_TURNS:g}")
    return turns


def _divisors(gguf: ModelFields, name: str, head_dim: int) -> tuple[float, ...]:
    """Read what each frequency is divided by, of a tensor; empty where there is none."""
    info = gguf.tensors.get(name)
    if info is None:
        return ()
    field = f"tensor {name!r}"
    if info.shape != (head_dim // 2,) or info.type != F32:
        problem = f"is {info.type.name} of shape {list(info.shape)}; it must be F32 of shape [{head_dim // 2}]"
        raise gguf.tensor_error(field, problem)
    values = torch.from_numpy(gguf.file.rows(info, 0, 1)).view(torch.float32)[0]
    if not (values.isfinite() & (values > 0)).all():
        raise gguf.tensor_error(field, "holds a number that is not above 0")
    return tuple(values.tolist())
