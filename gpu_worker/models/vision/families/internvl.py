"""InternVL 3 and 3.5: an image is cut into square tiles; to several of them a small picture of the whole is added."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gpu_worker.models.config import read_activation
from gpu_worker.models.vision.parts import (
    Attention,
    Linear,
    Neighbourhood,
    Norm,
    PlainMlp,
    VisionLayer,
    WeightTaker,
)
from gpu_worker.models.vision.pixels import cut, merged, normalised, patches_of, resize
from gpu_worker.models.vision.processor import ImagePlan, Pixels
from gpu_worker.models.vision.tower import VisionTower
from gpu_worker.models.vision.vision_config import (
    CLIP_COLOURS,
    VisionConfig,
    VisionFamily,
    VisionFiles,
    read_colours,
    read_side,
)
from kernels.activation import Activation, activate
from shared.media import Detail

_RENAMED = ((r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),)
_EPS = 1e-6
_PROJECTOR_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class TilesForm:
    """Images of square tiles of `side` pixels, as many tokens each, between the tokens `begin` and `end`.

    `min_tiles` and `max_tiles` do not count the picture of the whole; both are 1 where images are not cut.
    """

    placeholder: int
    begin: int
    end: int
    side: int
    tokens_per_tile: int
    patches_per_tile: int
    min_tiles: int
    max_tiles: int
    is_bidirectional: bool = False
    around: tuple[str, str] | None = None

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        rows, columns = (1, 1) if detail == "low" else self._tiles(width, height)
        count = rows * columns + (rows * columns > 1)
        num_rows = count * self.tokens_per_tile
        token_ids = [self.begin, *([self.placeholder] * num_rows), self.end]
        patches = count * self.patches_per_tile
        return ImagePlan(token_ids, (1, 1 + num_rows), num_rows, (rows, columns), patches, num_tiles=count)

    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """See `ImageForm`."""
        side, (rows, columns) = self.side, plan.patch_grid
        tiles = cut(resize(pixels, rows * side, columns * side, "bicubic"), side)
        if rows * columns > 1:
            tiles = np.concatenate((tiles, resize(pixels, side, side, "bicubic")[None]))
        return np.ascontiguousarray(tiles)

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns whose shape is nearest; of equal shapes the finest that is not much too fine."""
        sides = range(1, self.max_tiles + 1)
        grids = [(r, c) for c in sides for r in sides if self.min_tiles <= r * c <= self.max_tiles]
        best, least = (1, 1), float("inf")
        for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            difference = abs(width / height - columns / rows)
            is_filled = width * height > 0.5 * self.side**2 * rows * columns
            if difference < least or (difference == least and is_filled):
                best, least = (rows, columns), difference
        return best


@dataclass(frozen=True, slots=True)
class _Embed:
    patches: Linear
    first: torch.Tensor
    positions: torch.Tensor | None
    colours: torch.Tensor
    patch: int

    def __call__(self, values: torch.Tensor, grid: tuple[int, ...]) -> tuple[torch.Tensor, Neighbourhood]:
        mean, deviation = self.colours.to(values.device)
        patches = patches_of(normalised(values, mean, deviation), self.patch).flatten(2)
        stream = self.patches(patches.to(self.patches.weight.dtype))
        stream = torch.cat((self.first.expand(len(stream), -1, -1), stream), 1)
        return stream if self.positions is None else stream + self.positions, Neighbourhood()


@dataclass(frozen=True, slots=True)
class _Project:
    last_norm: Norm | None
    norm: Norm
    inner: Linear
    outer: Linear
    activation: Activation
    merge: int

    def __call__(self, stream: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        x = (stream if self.last_norm is None else self.last_norm(stream))[:, 1:]
        return self.outer(activate(self.inner(self.norm(merged(x, self.merge))), self.activation))


@dataclass(frozen=True, slots=True)
class _Sizes:
    depth: int
    size: int
    inner: int
    heads: int
    patch: int
    side: int
    merge: int
    hidden: int
    eps: float
    activation: Activation
    projector: Activation
    colours: torch.Tensor
    has_bias: bool
    has_head_norms: bool
    has_positions: bool
    has_last_norm: bool
    is_rms: bool


def _read_sizes(files: VisionFiles) -> _Sizes:
    vision, whole = files.vision, files.whole
    return _Sizes(
        vision.integer("num_hidden_layers", 24, maximum=1024),
        vision.integer("hidden_size", 1024),
        vision.integer("intermediate_size", 4096),
        vision.integer("num_attention_heads", 16, maximum=1024),
        read_side(vision, "patch_size", 14),
        read_side(vision, "image_size", 448),
        round(1 / whole.number("downsample_ratio", 0.5)),
        files.text.integer("hidden_size"),
        vision.number("layer_norm_eps", _EPS),
        read_activation(vision, default="gelu"),
        read_activation(whole, "projector_hidden_act", "gelu"),
        read_colours(files.processor, *CLIP_COLOURS),
        vision.boolean("attention_bias", False),
        vision.boolean("use_qk_norm", False),
        vision.boolean("use_absolute_position_embeddings", True),
        not vision.boolean("use_mean_pooling", True),
        vision.text("norm_type", "layer_norm") == "rms_norm",
    )


def _layer(taker: WeightTaker, sizes: _Sizes, index: int) -> VisionLayer:
    name, size, inner = f"vision_tower.encoder.layer.{index}", sizes.size, sizes.inner

    def norm(name: str) -> Norm:
        return taker.rms_norm(name, size, _EPS) if sizes.is_rms else taker.layer_norm(name, size, sizes.eps)

    heads = [f"{name}.attention.{part}_proj" for part in "qkv"]
    has_norms = sizes.has_head_norms
    attention = Attention(
        taker.linear(heads, [size] * 3, size, bias=sizes.has_bias),
        taker.linear(f"{name}.attention.projection_layer", size, size, bias=True),
        sizes.heads,
        taker.rms_norm(f"{name}.attention.q_norm", size, _EPS) if has_norms else None,
        taker.rms_norm(f"{name}.attention.k_norm", size, _EPS) if has_norms else None,
    )
    mlp = PlainMlp(
        taker.linear(f"{name}.mlp.fc1", inner, size, bias=True),
        taker.linear(f"{name}.mlp.fc2", size, inner, bias=True),
        sizes.activation,
    )
    scales = [taker.checkpoint.take(f"{name}.lambda_{number}", size) for number in (1, 2)]
    return VisionLayer(
        norm(f"{name}.layernorm_before"), attention, norm(f"{name}.layernorm_after"), mlp, scales[0], scales[1]
    )


def _take(taker: WeightTaker, device: torch.device, sizes: _Sizes) -> VisionTower:
    name, size, take = "vision_tower.embeddings", sizes.size, taker.checkpoint.take
    count, merged = (sizes.side // sizes.patch) ** 2 + 1, size * sizes.merge**2
    embed = _Embed(
        taker.patches(f"{name}.patch_embeddings.projection", size, sizes.patch, sizes.patch, bias=True),
        take(f"{name}.cls_token", 1, 1, size),
        take(f"{name}.position_embeddings", 1, count, size) if sizes.has_positions else None,
        sizes.colours,
        sizes.patch,
    )
    taker.checkpoint.discard(r"vision_tower\.embeddings\.mask_token")
    name = "multi_modal_projector"
    project = _Project(
        taker.layer_norm("vision_tower.layernorm", size, sizes.eps) if sizes.has_last_norm else None,
        taker.layer_norm(f"{name}.layer_norm", merged, _PROJECTOR_EPS),
        taker.linear(f"{name}.linear_1", sizes.hidden, merged, bias=True),
        taker.linear(f"{name}.linear_2", sizes.hidden, sizes.hidden, bias=True),
        sizes.projector,
        sizes.merge,
    )
    return VisionTower(embed, [_layer(taker, sizes, index) for index in range(sizes.depth)], project, device)


def _read_form(files: VisionFiles, sizes: _Sizes) -> TilesForm:
    processor, side, unit = files.processor, sizes.side, sizes.patch * sizes.merge
    if side % unit:
        raise files.vision.error("image_size", f"is {side}; it must be a multiple of {unit}")
    is_cut = processor.boolean("crop_to_patches", True)
    most = processor.integer("max_patches", 12, maximum=1024) if is_cut else 1
    return TilesForm(
        files.whole.integer("image_token_id", minimum=0),
        files.special_token("<img>"),
        files.special_token("</img>"),
        side,
        (side // unit) ** 2,
        (side // sizes.patch) ** 2 + 1,
        min(most, processor.integer("min_patches", 1)) if is_cut else 1,
        most,
    )


def _read(files: VisionFiles) -> VisionConfig:
    whole, sizes = files.whole, _read_sizes(files)
    layer, strategy = (whole.fields.get(f"vision_feature_{part}") for part in ("layer", "select_strategy"))
    if layer not in (-1, None) or strategy not in ("default", None):
        raise whole.error("vision_feature_layer", "must be -1, with vision_feature_select_strategy 'default'")
    form = _read_form(files, sizes)
    count = form.max_tiles + (form.max_tiles > 1)
    return VisionConfig(
        form,
        form.placeholder,
        sizes.depth,
        sizes.size,
        sizes.size * (4 * sizes.size + 2 * sizes.inner),
        count * form.tokens_per_tile,
        count * form.patches_per_tile,
        partial(_take, sizes=sizes),
        _RENAMED,
        r"(vision_tower|multi_modal_projector)\.",
    )


FAMILIES = (VisionFamily(("InternVLForConditionalGeneration",), _read),)
