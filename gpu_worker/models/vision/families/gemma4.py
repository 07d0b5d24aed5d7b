"""Gemma 4: images keep their shape and have a bounded number of patches, of which nine become one token.

Queries, keys and values have norms, and positions turn one half of a head by columns and the other by rows. In larger
models an image's tokens see one another in layers with windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from gpu_worker.models.rope_config import rope_fields
from gpu_worker.models.vision.embedding import PatchEmbedding, axis_positions, frequencies
from gpu_worker.models.vision.forms import PooledForm
from gpu_worker.models.vision.parts import (
    Attention,
    ClippedLinear,
    GatedMlp,
    Joined,
    Linear,
    Projector,
    RmsNorm,
    Transform,
    VisionLayer,
)
from gpu_worker.models.vision.vision_config import VisionConfig, VisionFamily, VisionFiles, read_colours, read_sizes
from gpu_worker.models.vision.weights import TowerSizes, WeightTaker

_RENAMED = ((r"^model\.(vision_tower|embed_vision)\.", r"\1."),)


@dataclass(frozen=True, slots=True)
class _Pool:
    """The mean of the patches of a token, standardized if the tower's are."""

    count: int
    offset: torch.Tensor | None
    scale: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.float().view(-1, self.count, x.shape[-1]).mean(1) * math.sqrt(x.shape[-1])
        if self.offset is not None and self.scale is not None:
            mean = (mean - self.offset.float()) * self.scale.float()
        return mean.to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Parts:
    sizes: TowerSizes
    num_places: int
    theta: float
    is_clipped: bool
    is_standardized: bool

    def embedding(self, taker: WeightTaker) -> PatchEmbedding:
        name, take, sizes, area = "vision_tower.patch_embedder", taker.checkpoint.take, self.sizes, self.sizes.patch**2
        # The checkpoint has the colours of a pixel side by side.
        patches = take(f"{name}.input_proj.weight", sizes.size, 3 * area)
        patches = patches.view(sizes.size, area, 3).transpose(1, 2).flatten(1).contiguous()
        positions = partial(axis_positions, take(f"{name}.position_embedding_table", 2, self.num_places, sizes.size))
        turns = frequencies(sizes.head_dim // 2, self.theta, taker.device)
        return PatchEmbedding(Linear(patches), sizes, positions, ((1, turns), (0, turns)))

    def layer(self, taker: WeightTaker, index: int) -> VisionLayer:
        name, size, inner = f"vision_tower.encoder.layers.{index}", self.sizes.size, self.sizes.inner
        mlp = GatedMlp(
            self._linear(taker, f"{name}.mlp.gate_proj", inner, size),
            self._linear(taker, f"{name}.mlp.up_proj", inner, size),
            self._linear(taker, f"{name}.mlp.down_proj", size, inner),
            self.sizes.activation,
        )
        before, after, before_mlp, after_mlp = (
            taker.rms_norm(f"{name}.{part}_layernorm", size, self.sizes.eps)
            for part in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        attention = self._attention(taker, f"{name}.self_attn")
        return VisionLayer(before, attention, before_mlp, mlp, added_norms=(after, after_mlp))

    def projector(self, taker: WeightTaker) -> Projector:
        sizes, take = self.sizes, taker.checkpoint.take
        offset, scale = (
            take(f"vision_tower.std_{part}", sizes.size) if self.is_standardized else None for part in ("bias", "scale")
        )
        norm = RmsNorm(taker.checkpoint.ones(sizes.size), sizes.eps)
        projection = taker.linear("embed_vision.embedding_projection", sizes.hidden, sizes.size, bias=False)
        return Projector((_Pool(sizes.merge**2, offset, scale), norm, projection))

    def _attention(self, taker: WeightTaker, name: str) -> Attention:
        """Take queries and keys so that halves of a head turn together: columns and rows, then columns and rows."""
        sizes, take = self.sizes, taker.checkpoint.take
        head = torch.arange(sizes.head_dim, device=taker.device).view(4, -1)[[0, 2, 1, 3]].flatten()
        order = (torch.arange(sizes.heads, device=taker.device)[:, None] * sizes.head_dim + head).flatten()
        inner = sizes.heads * sizes.head_dim
        query, key, value = (self._linear(taker, f"{name}.{part}_proj", inner, sizes.size) for part in "qkv")
        norms = [RmsNorm(take(f"{name}.{part}_norm.weight", sizes.head_dim)[head], sizes.eps) for part in "qk"]
        norms.append(RmsNorm(taker.checkpoint.ones(sizes.head_dim), sizes.eps))
        qkv = Joined((_reordered(query, order), _reordered(key, order), value))
        output = self._linear(taker, f"{name}.o_proj", sizes.size, inner)
        return Attention(qkv, output, sizes.heads, head_norms=norms, scale=1.0)

    def _linear(self, taker: WeightTaker, name: str, rows: int, columns: int) -> ClippedLinear | Linear:
        linear = taker.linear(f"{name}.linear", rows, columns, bias=False)
        if not self.is_clipped:
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


def _read_parts(files: VisionFiles) -> _Parts:
    vision = files.vision
    sizes = read_sizes(
        files,
        vision.integer("pooling_kernel_size", 3, maximum=64),
        depth=16,
        size=768,
        inner=3072,
        heads=12,
        eps=vision.number("rms_norm_eps", 1e-6),
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    )
    if vision.integer("num_key_value_heads", sizes.heads) != sizes.heads:
        raise vision.error("num_key_value_heads", f"must be that of the queries ({sizes.heads})")
    head_dim = vision.integer("head_dim", 64, maximum=1024)
    if head_dim % 4:
        raise vision.error("head_dim", f"is {head_dim}; it must be a multiple of 4")
    mean, deviation = read_colours(files.processor, ((0.0,) * 3, (1.0,) * 3), is_normalised=False)
    # What the processor makes is brought from 0 to 1 to -1 to 1.
    colours = torch.stack((mean + deviation / 2, deviation / 2))
    return _Parts(
        replace(sizes, head_dim=head_dim, colours=colours),
        vision.integer("position_embedding_size", 10_240),
        rope_fields(vision).optional_number("rope_theta") or 100.0,
        vision.boolean("use_clipped_linears", False),
        vision.boolean("standardize", False),
    )


def _read(files: VisionFiles) -> VisionConfig:
    whole, processor, parts = files.whole, files.processor, _read_parts(files)
    sizes = parts.sizes
    for name, mine in (("patch_size", sizes.patch), ("pooling_kernel_size", sizes.merge)):
        if processor.integer(name, mine) != mine:
            raise processor.error(name, f"must be that of the tower ({mine})")
    most, places = processor.integer("max_soft_tokens", 280, maximum=1 << 16), parts.num_places
    if most * sizes.merge > places:
        raise processor.error("max_soft_tokens", f"is {most}; the tower has positions for {places} patches a side")
    form = PooledForm(
        whole.integer("image_token_id", 258_880),
        sizes.patch,
        sizes.merge,
        whole.integer("boi_token_id", 255_999),
        whole.integer("eoi_token_id", 258_882),
        most,
        is_bidirectional=files.text.fields.get("use_bidirectional_attention") == "vision",
    )
    return VisionConfig(form, parts, _RENAMED, r"(vision_tower|embed_vision)\.", num_mlp_linears=3)


FAMILIES = (VisionFamily(("Gemma4ForConditionalGeneration",), _read),)
