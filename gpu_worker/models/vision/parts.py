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


@dataclass(frozen=True, slots=True)
class ClippedLinear:
    """Multiplies by a matrix; what goes in and what comes out is kept within bounds."""

    linear: Linear
    inside: tuple[float, float]
    outside: tuple[float, float]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform the last dimension."""
        return self.linear(x.clamp(*self.inside)).clamp_(*self.outside)


@dataclass(frozen=True, slots=True)
class Joined:
    """Several transforms that read the same; their results stand behind one another."""

    parts: Sequence[Transform]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform the last dimension."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


class Transform(Protocol):
    """Transforms the last dimension, as a linear layer does."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor whose last dimension may have another size."""
        ...


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
    """Attention of patches in both directions; with `is_local`, within their segment.

    Attributes:
        query_norm, key_norm: Of all heads as one.
        head_norms: Of each head of queries, keys and values.
        scale: What scores are multiplied by; None is `head_dim ** -0.5`.
    """

    qkv: Transform
    output: Transform
    num_heads: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    is_local: bool = False
    head_norms: Sequence[Norm] = ()
    scale: float | None = None

    def __call__(self, x: torch.Tensor, where: Neighbourhood) -> torch.Tensor:
        """Attend."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        heads = (*x.shape[:2], self.num_heads, -1)
        query, key, value = (part.reshape(heads).transpose(1, 2) for part in (query, key, value))
        if self.head_norms:
            query, key, value = (norm(part) for norm, part in zip(self.head_norms, (query, key, value), strict=True))
        if where.cos is not None and where.sin is not None:
            query, key = (_rotated(part, where.cos, where.sin) for part in (query, key))
        if not self.is_local or not where.segments:
            attended = functional.scaled_dot_product_attention(query, key, value, scale=self.scale)
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

    gate: Transform
    inner: Transform
    outer: Transform
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform the last dimension."""
        return self.outer(activate(self.gate(x), self.activation) * self.inner(x))


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """Attention and a feed-forward block, each behind a normalisation.

    What they yield is scaled by `[size]`, or normalised once more, if at all.
    """

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: FeedForward
    attention_scale: torch.Tensor | None = None
    mlp_scale: torch.Tensor | None = None
    added_norms: tuple[Norm, Norm] | None = None

    def __call__(self, x: torch.Tensor, where: Neighbourhood) -> torch.Tensor:
        """Return the stream behind the layer."""
        x = x + self._added(self.attention(self.attention_norm(x), where), 0, self.attention_scale)
        return x + self._added(self.mlp(self.mlp_norm(x)), 1, self.mlp_scale)

    def _added(self, x: torch.Tensor, index: int, scale: torch.Tensor | None) -> torch.Tensor:
        if self.added_norms is not None:
            return self.added_norms[index](x)
        return x if scale is None else x * scale


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

    def siglip_layer(self, name: str, size: int, inner: int, heads: int, eps: float, mlp: Activation) -> VisionLayer:
        """Take a layer of a SigLIP tower."""
        attention = Attention(
            self.linear([f"{name}.self_attn.{part}_proj" for part in "qkv"], [size] * 3, size, bias=True),
            self.linear(f"{name}.self_attn.out_proj", size, size, bias=True),
            heads,
        )
        outer = self.linear(f"{name}.mlp.fc2", size, inner, bias=True)
        block = PlainMlp(self.linear(f"{name}.mlp.fc1", inner, size, bias=True), outer, mlp)
        norms = [self.layer_norm(f"{name}.layer_norm{number}", size, eps) for number in (1, 2)]
        return VisionLayer(norms[0], attention, norms[1], block)

    def patches(self, name: str, size: int, *window: int, bias: bool) -> Linear:
        """Take a convolution whose stride is its window: a linear layer of patches, `[3, *window]` flattened."""
        take = self.checkpoint.take
        weight = take(f"{name}.weight", size, 3, *window).flatten(1)
        return Linear(weight, take(f"{name}.bias", size) if bias else None)
