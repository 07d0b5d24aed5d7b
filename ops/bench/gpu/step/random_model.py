"""Our model in a published shape with random weights: a step takes as long with them as with trained ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.layer_traits import AttentionShape, GatedShape, HeadNorm, LayerTraits
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.families import llama, qwen3
from kernels.linear import LinearFactory
from ops.bench.gpu.shapes import ModelShape


class RandomWeights:
    """A `WeightSource` that makes up what it is asked for, and remembers it for the peers that share it.

    Matrices keep the variance of what they multiply; normalisations do nothing; biases are zero.

    Attributes:
        tensors: By name in the checkpoint, views of what the model holds.
        matrices: Everything that multiplies, fused as the model holds it; the embedding is the first.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.matrices: list[torch.Tensor] = []
        self._dtype = dtype
        self._device = device
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Make one tensor."""
        return self.take_rows([name], [shape])

    def take_rows(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Make several tensors, one after another along their first dimension."""
        rows = [shape[0] for shape in shapes]
        whole = torch.empty((sum(rows), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        if whole.dim() > 1:
            whole.normal_(0.0, whole.shape[-1] ** -0.5, generator=self._generator)
            self.matrices.append(whole)
        else:
            whole.fill_(0.0 if names[0].endswith(".bias") else 1.0)
        self.tensors |= zip(names, whole.split_with_sizes(rows), strict=True)
        return whole

    def take_float32(self, name: str, *shape: int) -> torch.Tensor:
        """Make one tensor that is not of the model's type."""
        return self.take(name, *shape).float()

    def ones(self, size: int) -> torch.Tensor:
        """Return as many ones."""
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def take_item(self, name: str, index: int, *shape: int) -> torch.Tensor:
        """Make one of several tensors that a checkpoint has as one."""
        return self.take(f"{name}.{index}", *shape[1:])

    def has(self, name: str) -> bool:
        """Say what makes the model ask for all experts at once."""
        return name.endswith(".experts.gate_up_proj")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a tensor was asked for in."""
        return tuple(self.tensors[name].shape)

    def error(self, name: str, problem: str) -> Exception:
        """Make the error that names a tensor."""
        return ValueError(f"tensor {name!r} {problem}")

    def discard(self, pattern: str) -> None:
        """Make nothing."""


def random_model(
    shape: ModelShape, max_model_len: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[CausalLM, RandomWeights]:
    """Make the model; `max_model_len` bounds the rotary table."""
    weights = RandomWeights(dtype, device)
    return CausalLM(model_config(shape, max_model_len), weights, dtype, device, LinearFactory(free_host_bytes)), weights


def model_config(shape: ModelShape, max_model_len: int) -> ModelConfig:
    """Return the configuration that a checkpoint of this shape has, with its rotary positions unscaled."""
    head_norm = HeadNorm.HEADS if shape.has_qk_norm else HeadNorm.NONE
    attention = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, head_norm=head_norm)
    return ModelConfig(
        architecture=qwen3.ARCHITECTURE if shape.has_qk_norm else llama.ARCHITECTURE,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope=RopeParameters(RopeType.DEFAULT, shape.rope_theta, max_model_len),
        max_model_len=max_model_len,
        layers=(LayerTraits(attention, GatedShape(shape.intermediate_size)),) * shape.num_layers,
        tie_word_embeddings=shape.ties_embeddings,
        eos_token_ids=frozenset(),
        bos_token_id=None,
        dtype=torch.bfloat16,
    )
