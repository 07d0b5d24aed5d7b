"""The parts that vision towers are made of: linear layers, normalisations, attention over patches, feed-forward blocks.

Weights only: every call's state is in its arguments. Streams are `[num_tiles, num_patches, size]`; patches of one tile
see one another, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.activation import Activation, activate

Transform = Callable[[torch.Tensor], torch.Tensor]
"""Transforms the last dimension, which may get another size: a linear layer, a normalisation, a feed-forward block."""


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
        norms: Of queries and keys, all heads as one.
        head_norms: Of each head of queries, keys and values.
        scale: What scores are multiplied by; None is `head_dim ** -0.5`.
    """

    qkv: Transform
    output: Transform
    num_heads: int
    norms: Sequence[Transform] = ()
    is_local: bool = False
    head_norms: Sequence[Transform] = ()
    scale: float | None = None

    def __call__(self, x: torch.Tensor, where: Neighbourhood) -> torch.Tensor:
        """Attend."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        if self.norms:
            query, key = (norm(part) for norm, part in zip(self.norms, (query, key), strict=True))
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
    """Attention and a feed-forward block, each behind a normalisation: two stages of a tower.

    What they yield is scaled by `[size]`, or normalised once more, if at all.
    """

    attention_norm: Transform
    attention: Attention
    mlp_norm: Transform
    mlp: Transform
    attention_scale: torch.Tensor | None = None
    mlp_scale: torch.Tensor | None = None
    added_norms: tuple[Transform, Transform] | None = None

    def attend(self, x: torch.Tensor, where: Neighbourhood) -> torch.Tensor:
        """Return the stream behind the attention."""
        return x + self._added(self.attention(self.attention_norm(x), where), 0, self.attention_scale)

    def feed_forward(self, x: torch.Tensor, where: Neighbourhood) -> torch.Tensor:
        """Return the stream behind the feed-forward block; wherever patches are, each is computed by itself."""
        return x + self._added(self.mlp(self.mlp_norm(x)), 1, self.mlp_scale)

    def _added(self, x: torch.Tensor, index: int, scale: torch.Tensor | None) -> torch.Tensor:
        if self.added_norms is not None:
            return self.added_norms[index](x)
        return x if scale is None else x * scale


@dataclass(frozen=True, slots=True)
class Merge:
    """Makes one vector of each `count` that follow one another: they side by side, or with `is_mean` their mean."""

    count: int
    is_mean: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, count * size]`, or `[num_rows, size]`."""
        size = x.shape[-1]
        return x.reshape(-1, self.count, size).mean(1) if self.is_mean else x.reshape(-1, self.count * size)


@dataclass(frozen=True, slots=True)
class Projector:
    """From a tower's stream to embeddings, in steps."""

    steps: Sequence[Transform]

    def __call__(self, stream: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Return `[num_rows, hidden_size]`."""
        for step in self.steps:
            stream = step(stream)
        return stream
