"""Models in published shapes with random weights, and how large each weight is.

A step takes as long with them as with trained ones. Weights take the way that those of a checkpoint take: the family's
reader and the same packing, experts in MXFP4 where the published ones are so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.layer_source import QuantizedLayers
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.registry import FAMILIES
from gpu_worker.quantization.mxfp4 import GROUP_SIZE
from kernels.linear import LinearFactory
from kernels.linear.forms import FLOAT4, GroupQuantizedWeight
from ops.bench.gpu.shapes import ModelShape

_BLOCKS, _SCALES = "_blocks", "_scales"
# Exponents of the scales' powers of two, with the bias of 127: codes come out as large as plain weights.
_LOWEST_SCALE, _HIGHEST_SCALE = 119, 122
_CODES_PER_BYTE = 2


@dataclass(frozen=True, slots=True)
class WeightSize:
    """How many numbers a tensor holds, and the bytes that it is stored in."""

    numbers: int
    num_bytes: int


class RandomWeights:
    """A `WeightSource` that makes up random weights on request.

    Matrices keep the variance of what they multiply; normalisations do nothing; biases are zero; states remember some
    ten tokens.

    Attributes:
        sizes: Of every tensor that was taken, by its name in the checkpoint.
        tensors: Where a peer shares the weights, by the names of `transformers`: views of what the model holds.
        matrices: Likewise everything that multiplies, fused as the model holds it; the embedding is the first.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_tensors: bool,
        stacks_experts: bool = True,
    ) -> None:
        self.sizes: dict[str, WeightSize] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.matrices: list[torch.Tensor] = []
        self._config = config
        self._dtype = dtype
        self._device = device
        self._keeps_tensors = keeps_tensors
        self._stacks_experts = stacks_experts
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
        self._stack = torch.empty(0)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Make one tensor."""
        return self.take_rows([name], [shape])

    def take_rows(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Make several tensors, one after another along their first dimension."""
        rows = [shape[0] for shape in shapes]
        whole = torch.empty((sum(rows), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        if whole.dim() > 1:
            whole.normal_(0.0, whole.shape[-1] ** -0.5, generator=self._generator)
        else:
            self._fill_vector(names[0], whole)
        parts = dict(zip(names, whole.split_with_sizes(rows), strict=True))
        self.sizes |= {name: WeightSize(part.numel(), part.nbytes) for name, part in parts.items()}
        if self._keeps_tensors:
            self.tensors |= parts
            self.matrices += [whole] if whole.dim() > 1 else []
        return whole

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """Make one tensor that is not of the model's type."""
        return self.take(name, *shape).float()

    def take_item(self, name: str, index: int, *shape: int) -> torch.Tensor:
        """Make all tensors of a stack with the first of them."""
        if index == 0:
            self._stack = self.take(name, *shape)
        return self._stack[index]

    def take_raw(self, name: str) -> torch.Tensor:
        """Make the codes of all experts."""
        return torch.stack([self.take_raw_item(name, index) for index in range(self.shape(name)[0])])

    def take_raw_item(self, name: str, index: int) -> torch.Tensor:
        """Make the blocks of one expert, or their exponents."""
        shape = self.shape(name)
        low, high = (_LOWEST_SCALE, _HIGHEST_SCALE) if name.endswith(_SCALES) else (0, 1 << 8)
        made = torch.empty(shape[1:], dtype=torch.uint8, device=self._device)
        made.random_(low, high, generator=self._generator)
        if index == 0:
            numbers = 0 if name.endswith(_SCALES) else _CODES_PER_BYTE * shape[0] * made.numel()
            self.sizes[name] = WeightSize(numbers, shape[0] * made.nbytes)
        if self._keeps_tensors:
            self._keep_item(name, index, made)
        return made

    def ones(self, size: int) -> torch.Tensor:
        """Return as many ones."""
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def has(self, name: str) -> bool:
        """Return whether experts are stacked, and in which form."""
        stored = _BLOCKS if self._config.quantization is not None else ""
        return self._stacks_experts and name.endswith((f".experts.gate_up_proj{stored}", f".experts.down_proj{stored}"))

    def stored_module(self, name: str) -> str:
        """Return the same name: nothing is stored."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of coded experts: blocks of 16 bytes, and an exponent for each."""
        stem, _, kind = name.rpartition("_")
        blocks = (layer.feed_forward for layer in self._config.layers)
        mixture = next(block for block in blocks if isinstance(block, MixtureShape))
        rows, columns = self._config.hidden_size, mixture.expert_size
        if stem.endswith("gate_up_proj"):
            rows, columns = mixture.activation.num_projections * mixture.expert_size, self._config.hidden_size
        groups = (mixture.num_experts, rows, columns // GROUP_SIZE)
        return groups if f"_{kind}" == _SCALES else (*groups, GROUP_SIZE // _CODES_PER_BYTE)

    def error(self, name: str, problem: str) -> Exception:
        """Make the error that names a tensor."""
        return ValueError(f"tensor {name!r} {problem}")

    def discard(self, pattern: str) -> None:
        """Make nothing."""

    def _fill_vector(self, name: str, vector: torch.Tensor) -> None:
        if name.endswith("A_log"):
            vector.uniform_(-4.0, 0.0, generator=self._generator)
        elif name.endswith(("dt_bias", ".sinks")):
            vector.normal_(generator=self._generator)
        else:
            is_offset = self._config.block.norm.is_offset and ".linear_attn." not in name
            vector.fill_(0.0 if is_offset or name.endswith(".bias") else 1.0)

    def _keep_item(self, name: str, index: int, made: torch.Tensor) -> None:
        if index == 0:
            self.tensors[name] = made.new_empty(self.shape(name))
        self.tensors[name][index] = made
        if not name.endswith(_SCALES) or index + 1 < self.shape(name)[0]:
            return
        stem = name.removesuffix(_SCALES)
        blocks, exponents = self.tensors.pop(f"{stem}{_BLOCKS}"), self.tensors.pop(name)
        forms = [
            GroupQuantizedWeight(codes.flatten(1), FLOAT4, GROUP_SIZE, scales.view(torch.float8_e8m0fnu))
            for codes, scales in zip(blocks, exponents, strict=True)
        ]
        self.tensors[stem] = torch.stack([form.dequantize().T for form in forms]).to(self._dtype)


def model_config(shape: ModelShape, max_model_len: int) -> ModelConfig:
    """Return the family reader's configuration, limited to the given sequence length."""
    fields = shape.config()
    config = FAMILIES[fields["architectures"][0]](JsonFile(Path(shape.name, "config.json"), fields))
    return dataclasses.replace(config, max_model_len=max_model_len)


def random_model(
    shape: ModelShape,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    keeps_tensors: bool | None = None,
    stacks_experts: bool = True,
    linears: LinearFactory | None = None,
) -> tuple[CausalLM, RandomWeights]:
    """Make the model; `max_model_len` bounds the rotary table.

    With `keeps_tensors` a peer may share the weights. That takes no memory in dense models, which hold them as they
    are made, so it is the default there. `stacks_experts` says whether a layer's experts are one tensor. `linears` are
    other layers than the fastest of the weights as they are.
    """
    config = model_config(shape, max_model_len)
    keeps = shape.is_dense if keeps_tensors is None else keeps_tensors
    weights = RandomWeights(config, dtype, device, keeps_tensors=keeps, stacks_experts=stacks_experts)
    quantized = None if config.quantization is None else QuantizedLayers(config.quantization, weights)
    linears = linears or LinearFactory(free_host_bytes, dtype)
    return CausalLM(config, weights, dtype, device, linears, quantized), weights
