"""What a model weighs and keeps, from its configuration alone.

Sizes come from the readers that serve the model (`gpu_worker.models`), and memory of keys and values from the layout
and the arithmetic that a worker has. What these formulas do not cover is unsupported, and not guessed.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch

from gpu_worker.execution.memory.budget import CacheDemand
from gpu_worker.execution.memory.group_shares import GroupShares
from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.registry import read_model_config
from gpu_worker.quantization.awq import AWQ
from gpu_worker.quantization.compressed_tensors import CompressedTensors, Layout
from gpu_worker.quantization.fp8 import FP8
from gpu_worker.quantization.gguf.model_file import SUFFIX
from gpu_worker.quantization.gptq import GPTQ
from gpu_worker.quantization.mxfp4 import MXFP4
from gpu_worker.quantization.quantization_method import QuantizationMethod
from ops.sizing.traffic import decode_weights, head_weights
from shared.errors import ConfigError

BLOCK_SIZE = 16
_EVERY_EXPERT = 1 << 20


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights of linear layers are stored.

    Attributes:
        bits: Of a weight, scales included.
        computes_8bit: Products are computed in eight bits where the device can.
    """

    name: str
    bits: float
    computes_8bit: bool = False


# int4: groups of 128 weights share a scale and a zero point of 16 bits each, as AWQ and GPTQ store them.
_FORMATS = (WeightFormat("bf16", 16), WeightFormat("fp8", 8, computes_8bit=True), WeightFormat("int4", 4.25))
FORMATS: Mapping[str, WeightFormat] = MappingProxyType({each.name: each for each in _FORMATS})
CACHE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
)


@dataclass(frozen=True)
class ModelSize:
    """A model of which decode steps can be predicted.

    Attributes:
        stored: Format of a checkpoint that is quantized already, the only one that it is served in.
        quantizes_experts_alone: Its other layers have 16 bits.
    """

    config: ModelConfig
    stored: str | None = None
    quantizes_experts_alone: bool = False

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the formats that its weights can have."""
        return tuple(FORMATS) if self.stored is None else (self.stored,)

    @property
    def embedding_weights(self) -> int:
        """Numbers of the embedding, and of the head where it is another matrix: both stay in 16 bits."""
        return head_weights(self.config) * (1 if self.config.tie_word_embeddings else 2)

    def read_weights(self, num_tokens: int) -> int:
        """Return how many layer weights a step of `num_tokens` reads; the expected number, of mixtures."""
        return decode_weights(self.config, num_tokens)

    def weight_bytes(self, form: WeightFormat) -> float:
        """Return the memory of all weights."""
        return self._layer_bytes(form, _EVERY_EXPERT) + self.embedding_weights * 2

    def step_bytes(self, form: WeightFormat, num_tokens: int) -> float:
        """Return the bytes of weights that a step of `num_tokens` reads, including the head."""
        return self._layer_bytes(form, num_tokens) + head_weights(self.config) * 2

    def _layer_bytes(self, form: WeightFormat, num_tokens: int) -> float:
        # A step without tokens meets no expert.
        plain = self.read_weights(0) if self.quantizes_experts_alone else 0
        return (self.read_weights(num_tokens) - plain) * form.bits / 8 + plain * 2

    def flops(self, num_tokens: int, num_sampled: int) -> float:
        """Return the floating-point operations of all matrix products of a step.

        Source: Kaplan et al., Scaling Laws for Neural Language Models (2020), table 1: two for each weight and token.
        """
        return 2.0 * (self._token_weights * num_tokens + head_weights(self.config) * num_sampled)

    @cached_property
    def _token_weights(self) -> int:
        return self.read_weights(1)

    def attention_flops(self, start: int, length: int) -> float:
        """Return the operations of attention for `length` tokens behind `start` others, causal.

        Source: the same table: two for each number of query and key, two for each of the value.
        """
        pairs = length * start + length * (length + 1) / 2
        return sum(
            flops * (pairs if window is None else min(pairs, float(length * window)))
            for window, flops in self._attention_flops.items()
        )

    def read_bytes(self, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the bytes of keys, values and states that a decode reads of a sequence of `num_tokens`."""
        size = dtype.itemsize
        seen = sum(
            numbers * size * (num_tokens if window is None else min(num_tokens, window))
            for window, numbers in self._kept_numbers.items()
        )
        # States are read and written.
        return seen + 2.0 * self._state_bytes

    @cached_property
    def _state_bytes(self) -> int:
        return self.config.cache_layout.state_bytes

    @cached_property
    def _kept_numbers(self) -> dict[int | None, float]:
        """Numbers of keys and values of a token, by the layers' window."""
        return self._by_window(lambda shape: shape.num_kv_heads * (shape.head_dim + shape.value_size))

    @cached_property
    def _attention_flops(self) -> dict[int | None, float]:
        """Operations of each pair of tokens, by the layers' window."""
        return self._by_window(lambda shape: 2 * shape.num_heads * (shape.head_dim + shape.value_size))

    def _by_window(self, number: Callable[[AttentionShape], int]) -> dict[int | None, float]:
        found: dict[int | None, float] = defaultdict(float)
        for layer in self.config.layers:
            if isinstance(layer.mixer, AttentionShape):
                found[layer.mixer.sliding_window] += number(layer.mixer)
        return found

    def demand(self, max_model_len: int, max_num_batched_tokens: int, dtype: torch.dtype) -> CacheDemand:
        """Return what a worker's cache takes for each block, as a worker divides its memory among groups of layers."""
        layout = self.config.cache_layout.within(max_model_len)
        return GroupShares(layout, BLOCK_SIZE, max_model_len, max_num_batched_tokens, dtype).demand


def read_model_size(model: Path) -> ModelSize:
    """Read a model's directory, or a `config.json` of any name.

    Raises:
        HeadraceError: It cannot be read, or is unsupported.
    """
    if model.is_file() and model.suffix == ".json":
        with tempfile.TemporaryDirectory(prefix="headrace-plan-") as folder:
            (Path(folder) / "config.json").symlink_to(model.resolve())
            try:
                return _checked(model, read_model_config(Path(folder)))
            except CheckpointError as error:
                raise CheckpointError(model, error.problem) from None
    if not model.exists():
        problem = f"there is no directory or file {model}; of a model at a hub its config.json is enough: download it"
        raise ConfigError("HEADRACE_MODEL", problem)
    if not model.is_dir() and model.suffix != SUFFIX:
        raise ConfigError("HEADRACE_MODEL", f"{model} is neither a model's directory nor a file *.json or *{SUFFIX}")
    return _checked(model, read_model_config(model))


def _checked(model: Path, config: ModelConfig) -> ModelSize:
    problem, stored = None, _stored_format(config.quantization)
    if stored is None and config.quantization is not None:
        without = "a copy of its config.json without `quantization_config` is planned, in any format"
        problem = f"there is no formula here for how its checkpoint is quantized; {without}"
    elif config.is_bidirectional:
        problem = "it generates nothing"
    elif not all(isinstance(layer.mixer, AttentionShape | GatedDeltaShape | None) for layer in config.layers):
        problem = "it has layers for whose steps there is no formula here: latent attention, or another recurrence"
    if problem is not None:
        raise ConfigError("HEADRACE_MODEL", f"{model} is unsupported: {problem}")
    return ModelSize(config, stored, quantizes_experts_alone=isinstance(config.quantization, MXFP4))


def _stored_format(method: QuantizationMethod | None) -> str | None:
    """Return the format that is nearest to a method's, within a few percent of all bytes; None if there is none."""
    if isinstance(method, FP8):
        return "fp8"
    if isinstance(method, AWQ | MXFP4) or (isinstance(method, GPTQ) and method.settings.bits == 4):
        return "int4"
    if isinstance(method, CompressedTensors):
        kinds = {(scheme.layout, scheme.bits) for _, scheme in method.groups}
        return {(Layout.FLOAT8, 8): "fp8", (Layout.PACKED, 4): "int4"}.get(kinds.pop()) if len(kinds) == 1 else None
    return None
