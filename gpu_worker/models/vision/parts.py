"""The parts that vision towers are made of: linear layers, normalisations, attention over patches, feed-forward blocks.

Weights only: every call's state is in its arguments. Streams are `[num_tiles, num_patches, size]`; patches of one tile
see one another, in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from gpu_worker.models.checkpoint import Checkpoint
from kernels.activation import Activation, activate


@dataclass(frozen=True, slots=True)
class Linear:
    """Multiplies by `weight`, `[out_features, in_features]`, and adds `bias`."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform the last dimension."""
        return functional.linear(x, self.weight, self.bias)


class Norm(Protocol):
    """Normalises the last dimension."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `x`."""
        ...


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Subtracts the mean and divides by the deviation."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `x`."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Divides by the root mean square, in float32."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `x`."""
        return (torch.rms_norm(x.float(), self.weight.shape, None, self.eps)).to(x.dtype) * self.weight


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """Where patches are, and which of them see one another.

    Attributes:
        cos, sin: `[num_patches, head_dim]` float32, rotations; None where nothing rotates.
        segments: Lengths of runs of patches that see one another; empty where all of a tile do.
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    segments: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of patches in both directions; with `is_local`, within their segment. Norms are of all heads as one."""

    qkv: Linear
    output: Linear
    num_heads: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    is_local: bool = False

    def __call__(self, x: torch.Tensor, where: Neighbourhood) -> torch.Tensor:
        """Attend."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        heads = (*x.shape[:2], self.num_heads, -1)
        query, key, value = (part.reshape(heads).transpose(1, 2) for part in (query, key, value))
        if where.cos is not None and where.sin is not None:
            query, key = (_rotated(part, where.cos, where.sin) for part in (query, key))
        if not self.is_local or not where.segments:
            attended = functional.scaled_dot_product_attention(query, key, value)
        else:
            attended = _attend_in_segments(query, key, value, where.segments)
        return self.output(attended.transpose(1, 2).flatten(2))


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn dimension `i` of a head with `i + head_dim / 2`, in float32."""
    x = heads.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


def _attend_in_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Sequence[int]
) -> torch.Tensor:
    """Attend within each segment; segments of equal length are computed at once."""
    starts = [0]
    for length in segments:
        starts.append(starts[-1] + length)
    result = torch.empty_like(query)
    for length in set(segments):
        first = [start for start, each in zip(starts, segments, strict=False) if each == length]
        places = (torch.tensor(first)[:, None] + torch.arange(length)).flatten().to(query.device)
        shape = (query.shape[1], len(first), length, query.shape[3])
        q, k, v = (part[0, :, places].reshape(shape).transpose(0, 1) for part in (query, key, value))
        attended = functional.scaled_dot_product_attention(q, k, v)
        result[0, :, places] = attended.transpose(0, 1).flatten(1, 2)
    return result


class FeedForward(Protocol):
    """Transforms each patch by itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is to be added to the stream."""
        ...


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """Two linear layers around an activation."""

    inner: Linear
    outer: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform the last dimension."""
        return self.outer(activate(self.inner(x), self.activation))


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """A linear layer, times an activated gate, and one back."""

    gate: Linear
    inner: Linear
    outer: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform the last dimension."""
        return self.outer(activate(self.gate(x), self.activation) * self.inner(x))


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """Attention and a feed-forward block, each behind a normalisation and scaled by `[size]`, if at all."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: FeedForward
    attention_scale: torch.Tensor | None = None
    mlp_scale: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, where: Neighbourhood) -> torch.Tensor:
        """Return the stream behind the layer."""
        added = self.attention(self.attention_norm(x), where)
        x = x + (added if self.attention_scale is None else added * self.attention_scale)
        added = self.mlp(self.mlp_norm(x))
        return x + (added if self.mlp_scale is None else added * self.mlp_scale)


@dataclass(frozen=True, slots=True)
class WeightTaker:
    """Takes a tower's weights from a checkpoint."""

    checkpoint: Checkpoint

    def linear(self, names: str | Sequence[str], sizes: int | Sequence[int], inputs: int, *, bias: bool) -> Linear:
        """Take a linear layer, or several that read the same as one."""
        names, sizes = [names] if isinstance(names, str) else names, [sizes] if isinstance(sizes, int) else sizes
        take = self.checkpoint.take_rows
        weight = take([f"{name}.weight" for name in names], [(size, inputs) for size in sizes])
        return Linear(weight, take([f"{name}.bias" for name in names], [(size,) for size in sizes]) if bias else None)

    def layer_norm(self, name: str, size: int, eps: float) -> LayerNorm:
        """Take a LayerNorm."""
        take = self.checkpoint.take
        return LayerNorm(take(f"{name}.weight", size), take(f"{name}.bias", size), eps)

    def rms_norm(self, name: str, size: int, eps: float, *, is_offset: bool = False) -> RmsNorm:
        """Take an RMS norm; its weights may be stored less one."""
        weight = self.checkpoint.take(f"{name}.weight", size)
        return RmsNorm(weight + 1 if is_offset else weight, eps)

    def patches(self, name: str, size: int, *window: int, bias: bool) -> Linear:
        """Take a convolution whose stride is its window: a linear layer of patches, `[3, *window]` flattened."""
        take = self.checkpoint.take
        weight = take(f"{name}.weight", size, 3, *window).flatten(1)
        return Linear(weight, take(f"{name}.bias", size) if bias else None)
