"""Takes the weights of towers from checkpoints: the layers and blocks that families share, under any names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.vision.parts import (
    Attention,
    GatedMlp,
    LayerNorm,
    Linear,
    PlainMlp,
    RmsNorm,
    Transform,
    VisionLayer,
)
from kernels.activation import Activation


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Sizes of a tower.

    Attributes:
        depth, size, inner, heads, head_dim: Layers, the stream, a feed-forward block, heads and their vectors.
        patch, merge: Pixels of a patch's side, and patches of a token's.
        hidden: Of the embeddings.
        eps: Of norms.
        colours: `[2, 3]` float32, mean and deviation of pixels, from 0 to 1.
    """

    depth: int
    size: int
    inner: int
    heads: int
    head_dim: int
    patch: int
    merge: int
    hidden: int
    eps: float
    activation: Activation
    colours: torch.Tensor

    @property
    def merged(self) -> int:
        """Size of the patches of a token side by side."""
        return self.size * self.merge**2


@dataclass(frozen=True, slots=True)
class WeightTaker:
    """Takes a tower's weights from a checkpoint to a device."""

    checkpoint: Checkpoint
    device: torch.device

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

    def attention(
        self,
        inner: str | Sequence[str],
        output: str,
        sizes: TowerSizes,
        *,
        bias: bool = True,
        output_bias: bool | None = None,
        norms: Sequence[Transform] = (),
        is_local: bool = False,
    ) -> Attention:
        """Take attention whose queries, keys and values are stored as one or as three; biases are of all or none."""
        size, output_bias = sizes.size, bias if output_bias is None else output_bias
        rows: int | list[int] = 3 * size if isinstance(inner, str) else [size] * 3
        qkv = self.linear(inner, rows, size, bias=bias)
        return Attention(qkv, self.linear(output, size, size, bias=output_bias), sizes.heads, norms, is_local)

    def plain_mlp(self, name: str, sizes: TowerSizes) -> PlainMlp:
        """Take a feed-forward block of two linear layers, `{name}1` and `{name}2`."""
        inner = self.linear(f"{name}1", sizes.inner, sizes.size, bias=True)
        return PlainMlp(inner, self.linear(f"{name}2", sizes.size, sizes.inner, bias=True), sizes.activation)

    def gated_mlp(self, name: str, sizes: TowerSizes, *, bias: bool) -> GatedMlp:
        """Take a feed-forward block with a gate."""
        gate, up = (self.linear(f"{name}.{part}_proj", sizes.inner, sizes.size, bias=bias) for part in ("gate", "up"))
        down = self.linear(f"{name}.down_proj", sizes.size, sizes.inner, bias=bias)
        return GatedMlp(gate, up, down, sizes.activation)

    def siglip_layer(self, name: str, sizes: TowerSizes) -> VisionLayer:
        """Take a layer of a SigLIP tower."""
        heads = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        return VisionLayer(
            self.layer_norm(f"{name}.layer_norm1", sizes.size, sizes.eps),
            self.attention(heads, f"{name}.self_attn.out_proj", sizes),
            self.layer_norm(f"{name}.layer_norm2", sizes.size, sizes.eps),
            self.plain_mlp(f"{name}.mlp.fc", sizes),
        )

    def patches(self, name: str, sizes: TowerSizes, *, bias: bool, frames: int | None = None) -> Linear:
        """Take a convolution whose stride is its window: a linear layer of patches, `[3, *window]` flattened."""
        take, window = self.checkpoint.take, [*([] if frames is None else [frames]), sizes.patch, sizes.patch]
        weight = take(f"{name}.weight", sizes.size, 3, *window).flatten(1)
        return Linear(weight, take(f"{name}.bias", sizes.size) if bias else None)
