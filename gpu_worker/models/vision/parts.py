"""The parts that vision towers are made of: linear layers, normalisations, attention over patches, feed-forward blocks.

Weights only: every call's state is in its arguments. Patches of one tile see one another, in both directions. Streams
are `[num_patches, size]`, of one tile behind the other, and what computes each patch by itself takes any part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of some patches' rotations, `[num_patches, head_dim]` float32."""


class Runs(NamedTuple):
    """Patches that see one another: `number` runs of `length` each, behind one another from patch `first` on."""

    first: int
    length: int
    number: int


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries, keys and values of patches, each `[num_heads, num_patches, head_dim]`.

    A head's rows lie side by side: on CPUs attention reads them 2 to 4 times as fast as rows of all heads in turn.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of patches in both directions; with `is_local`, within their window.

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

    def heads(self, x: torch.Tensor, turns: Turns | None) -> Heads:
        """Return queries, keys and values of some patches."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        if self.norms:
            query, key = (norm(part) for norm, part in zip(self.norms, (query, key), strict=True))
        query, key, value = (part.reshape(len(part), self.num_heads, -1) for part in (query, key, value))
        if self.head_norms:
            query, key, value = (norm(part) for norm, part in zip(self.head_norms, (query, key, value), strict=True))
        if turns is not None:
            query, key = (_rotated(part, turns) for part in (query, key))
        return Heads(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))

    def attend(self, heads: Heads, patches: slice, runs: Sequence[Runs]) -> torch.Tensor:
        """Return what some patches read of those in their runs, `[num_patches, size]`."""
        read = []
        for queries, keys, count in _parts_of(runs, patches):
            query, key, value = (
                part[:, places].reshape(len(part), count, -1, part.shape[2]).transpose(0, 1)
                for part, places in ((heads.query, queries), (heads.key, keys), (heads.value, keys))
            )
            attended = functional.scaled_dot_product_attention(query, key, value, scale=self.scale)
            read.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
        return self.output(read[0] if len(read) == 1 else torch.cat(read))


def _parts_of(runs: Sequence[Runs], patches: slice) -> Iterator[tuple[slice, slice, int]]:
    """Divide patches into parts of a run, and several whole ones; yield them, what they see, and how many runs."""
    for first, length, number in runs:
        begin, end = max(patches.start, first), min(patches.stop, first + length * number)
        while begin < end:
            start = begin - (begin - first) % length
            num_whole = (end - begin) // length if begin == start else 0
            stop = min(end, start + length * max(1, num_whole))
            yield slice(begin, stop), slice(start, start + length * max(1, num_whole)), max(1, num_whole)
            begin = stop


def _rotated(heads: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Turn dimension `i` of a head with `i + head_dim / 2`, in float32."""
    x = heads.float()
    first, second = x.chunk(2, dim=-1)
    cos, sin = (each[:, None] for each in turns)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


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

    attention_norm: Transform
    attention: Attention
    mlp_norm: Transform
    mlp: Transform
    attention_scale: torch.Tensor | None = None
    mlp_scale: torch.Tensor | None = None
    added_norms: tuple[Transform, Transform] | None = None

    def heads(self, x: torch.Tensor, turns: Turns | None) -> Heads:
        """Return queries, keys and values of some patches of the stream."""
        return self.attention.heads(self.attention_norm(x), turns)

    def attend(self, x: torch.Tensor, heads: Heads, patches: slice, runs: Sequence[Runs]) -> torch.Tensor:
        """Return some patches of the stream behind the attention."""
        return x + self._added(self.attention.attend(heads, patches, runs), 0, self.attention_scale)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return some patches of the stream behind the feed-forward block."""
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

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, hidden_size]` of the patches of these embeddings."""
        for step in self.steps:
            stream = step(stream)
        return stream
