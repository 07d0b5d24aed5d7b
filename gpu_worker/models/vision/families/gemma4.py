"""Gemma 4: images keep their shape and have a bounded number of patches, of which nine become one token.

Queries, keys and values have norms, and positions turn one half of a head by columns and the other by rows. In larger
models an image's tokens see one another in layers with windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from gpu_worker.models.config import read_activation
from gpu_worker.models.rope_config import rope_fields
from gpu_worker.models.vision.parts import (
    Attention,
    ClippedLinear,
    GatedMlp,
    Joined,
    Linear,
    Neighbourhood,
    Norm,
    RmsNorm,
    Transform,
    VisionLayer,
    WeightTaker,
)
from gpu_worker.models.vision.pixels import patches_of, places_of, resize
from gpu_worker.models.vision.processor import ImagePlan, Pixels
from gpu_worker.models.vision.tower import VisionTower
from gpu_worker.models.vision.vision_config import VisionConfig, VisionFamily, VisionFiles
from kernels.activation import Activation
from shared.media import Detail

_LOW_DETAIL_TOKENS = 70
_RENAMED = ((r"^model\.(vision_tower|embed_vision)\.", r"\1."),)


@dataclass(frozen=True, slots=True)
class PooledForm:
    """Images of at most `max_tokens` tokens, each of `merge` patches in rows and columns; they are enlarged to as many.

    Attributes:
        begin, end: Stand around an image's tokens.
    """

    placeholder: int
    begin: int
    end: int
    patch: int
    merge: int
    max_tokens: int
    is_bidirectional: bool
    around: tuple[str, str] | None = None

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        most = min(self.max_tokens, _LOW_DETAIL_TOKENS) if detail == "low" else self.max_tokens
        unit = self.patch * self.merge
        grow = math.sqrt(most * unit**2 / (width * height))
        rows, columns = (math.floor(grow * side / unit) for side in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        count, grid = rows * columns, (rows * self.merge, columns * self.merge)
        token_ids = [self.begin, *([self.placeholder] * count), self.end]
        return ImagePlan(token_ids, (1, 1 + count), count, grid, grid[0] * grid[1])

    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """See `ImageForm`."""
        rows, columns = plan.patch_grid
        return resize(pixels, rows * self.patch, columns * self.patch, "bicubic")[None]


@dataclass(frozen=True, slots=True)
class _Sizes:
    depth: int
    size: int
    inner: int
    heads: int
    head_dim: int
    patch: int
    merge: int
    places: int
    hidden: int
    theta: float
    eps: float
    activation: Activation
    is_clipped: bool
    is_standardized: bool


@dataclass(frozen=True, slots=True)
class _Embed:
    patches: Linear
    positions: torch.Tensor
    frequencies: torch.Tensor
    sizes: _Sizes

    def __call__(self, values: torch.Tensor, grid: tuple[int, ...]) -> tuple[torch.Tensor, Neighbourhood]:
        rows, columns = (each.to(values.device) for each in places_of(grid[0], grid[1], self.sizes.merge))
        patches = patches_of(values.float() * (2 / 255) - 1, self.sizes.patch, self.sizes.merge).flatten(2)
        stream = self.patches(patches.to(self.patches.weight.dtype))
        turns = torch.cat([place[:, None] * self.frequencies for place in (columns, rows)], 1).repeat(1, 2)
        return stream + self.positions[0, columns] + self.positions[1, rows], Neighbourhood(turns.cos(), turns.sin())


@dataclass(frozen=True, slots=True)
class _Project:
    """The mean of neighbouring patches, standardized if the tower's are, normalised and projected."""

    offset: torch.Tensor | None
    scale: torch.Tensor | None
    norm: Norm
    projection: Linear
    merge: int

    def __call__(self, stream: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        x = stream.float().view(-1, self.merge**2, stream.shape[-1]).mean(1) * stream.shape[-1] ** 0.5
        if self.offset is not None and self.scale is not None:
            x = (x - self.offset.float()) * self.scale.float()
        return self.projection(self.norm(x.to(stream.dtype)))


def _linear(taker: WeightTaker, name: str, rows: int, columns: int, sizes: _Sizes) -> ClippedLinear | Linear:
    linear = taker.linear(f"{name}.linear", rows, columns, bias=False)
    if not sizes.is_clipped:
        return linear
    take = taker.checkpoint.take_float32
    inside, outside = (
        (take(f"{name}.{end}_min").item(), take(f"{name}.{end}_max").item()) for end in ("input", "output")
    )
    return ClippedLinear(linear, inside, outside)


def _reordered(linear: ClippedLinear | Linear, order: torch.Tensor) -> Transform:
    if isinstance(linear, Linear):
        return Linear(linear.weight[order])
    return ClippedLinear(Linear(linear.linear.weight[order]), linear.inside, linear.outside)


def _attention(taker: WeightTaker, name: str, sizes: _Sizes) -> Attention:
    """Take queries and keys so that halves of a head turn together: columns and rows, then columns and rows."""
    quarters = torch.arange(sizes.head_dim).view(4, -1)
    head = quarters[[0, 2, 1, 3]].flatten()
    order = (torch.arange(sizes.heads)[:, None] * sizes.head_dim + head).flatten()
    size, inner = sizes.size, sizes.heads * sizes.head_dim
    query, key, value = (_linear(taker, f"{name}.{part}_proj", inner, size, sizes) for part in "qkv")
    take = taker.checkpoint.take
    query_norm, key_norm = (take(f"{name}.{part}_norm.weight", sizes.head_dim) for part in "qk")
    norms = [RmsNorm(weight[head.to(weight.device)], sizes.eps) for weight in (query_norm, key_norm)]
    norms.append(RmsNorm(torch.ones_like(query_norm), sizes.eps))
    order = order.to(query_norm.device)
    qkv = Joined((_reordered(query, order), _reordered(key, order), value))
    output = _linear(taker, f"{name}.o_proj", size, inner, sizes)
    return Attention(qkv, output, sizes.heads, head_norms=norms, scale=1.0)


def _layer(taker: WeightTaker, sizes: _Sizes, index: int) -> VisionLayer:
    name, size, inner = f"vision_tower.encoder.layers.{index}", sizes.size, sizes.inner
    mlp = GatedMlp(
        _linear(taker, f"{name}.mlp.gate_proj", inner, size, sizes),
        _linear(taker, f"{name}.mlp.up_proj", inner, size, sizes),
        _linear(taker, f"{name}.mlp.down_proj", size, inner, sizes),
        sizes.activation,
    )

    def norm(part: str) -> Norm:
        return taker.rms_norm(f"{name}.{part}_layernorm", size, sizes.eps)

    added_norms = norm("post_attention"), norm("post_feedforward")
    attention = _attention(taker, f"{name}.self_attn", sizes)
    return VisionLayer(norm("input"), attention, norm("pre_feedforward"), mlp, added_norms=added_norms)


def _take(taker: WeightTaker, device: torch.device, sizes: _Sizes) -> VisionTower:
    take, size, area, axis = taker.checkpoint.take, sizes.size, sizes.patch**2, sizes.head_dim // 2
    # The checkpoint has the colours of a pixel side by side.
    patches = take("vision_tower.patch_embedder.input_proj.weight", size, 3 * area)
    patches = patches.view(size, area, 3).transpose(1, 2).flatten(1).contiguous()
    exponents = torch.arange(0, axis, 2, dtype=torch.float32, device=device) / axis
    positions = take("vision_tower.patch_embedder.position_embedding_table", 2, sizes.places, size)
    embed = _Embed(Linear(patches), positions, 1.0 / sizes.theta**exponents, sizes)
    layers = [_layer(taker, sizes, index) for index in range(sizes.depth)]
    offset, scale = (
        take(f"vision_tower.std_{part}", size) if sizes.is_standardized else None for part in ("bias", "scale")
    )
    norm = RmsNorm(torch.ones(size, dtype=patches.dtype, device=device), sizes.eps)
    projection = taker.linear("embed_vision.embedding_projection", sizes.hidden, size, bias=False)
    return VisionTower(embed, layers, _Project(offset, scale, norm, projection, sizes.merge), device)


def _read_sizes(files: VisionFiles) -> _Sizes:
    vision = files.vision
    heads = vision.integer("num_attention_heads", 12, maximum=1024)
    if vision.integer("num_key_value_heads", heads) != heads:
        raise vision.error("num_key_value_heads", f"must be that of the queries ({heads})")
    head_dim = vision.integer("head_dim", 64, maximum=1024)
    if head_dim % 4:
        raise vision.error("head_dim", f"is {head_dim}; it must be a multiple of 4")
    return _Sizes(
        vision.integer("num_hidden_layers", 16, maximum=1024),
        vision.integer("hidden_size", 768),
        vision.integer("intermediate_size", 3072),
        heads,
        head_dim,
        vision.integer("patch_size", 16, maximum=1024),
        vision.integer("pooling_kernel_size", 3, maximum=64),
        vision.integer("position_embedding_size", 10_240),
        files.text.integer("hidden_size"),
        rope_fields(vision).optional_number("rope_theta") or 100.0,
        vision.number("rms_norm_eps", 1e-6),
        read_activation(vision, "hidden_activation", "gelu_pytorch_tanh"),
        vision.boolean("use_clipped_linears", False),
        vision.boolean("standardize", False),
    )


def _read(files: VisionFiles) -> VisionConfig:
    whole, processor, sizes = files.whole, files.processor, _read_sizes(files)
    for name, mine in (("patch_size", sizes.patch), ("pooling_kernel_size", sizes.merge)):
        if processor.integer(name, mine) != mine:
            raise processor.error(name, f"must be that of the tower ({mine})")
    most = processor.integer("max_soft_tokens", 280, maximum=1 << 16)
    if most * sizes.merge > sizes.places:
        raise processor.error(
            "max_soft_tokens", f"is {most}; the tower has positions for {sizes.places} patches a side"
        )
    token = whole.integer("image_token_id", 258_880)
    form = PooledForm(
        token,
        whole.integer("boi_token_id", 255_999),
        whole.integer("eoi_token_id", 258_882),
        sizes.patch,
        sizes.merge,
        most,
        files.text.fields.get("use_bidirectional_attention") == "vision",
    )
    width = sizes.heads * sizes.head_dim
    return VisionConfig(
        form,
        token,
        sizes.depth,
        sizes.size,
        sizes.size * (4 * width + 3 * sizes.inner),
        most,
        most * sizes.merge**2,
        partial(_take, sizes=sizes),
        _RENAMED,
        r"(vision_tower|embed_vision)\.",
    )


FAMILIES = (VisionFamily(("Gemma4ForConditionalGeneration",), _read),)
