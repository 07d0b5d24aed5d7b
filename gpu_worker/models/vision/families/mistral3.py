"""The Pixtral tower of Mistral Small 3.1 and 3.2 and Ministral 3: images keep their shape, rows end with a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from gpu_worker.models.config import read_activation
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.vision.parts import (
    Attention,
    GatedMlp,
    Linear,
    Neighbourhood,
    Norm,
    VisionLayer,
    WeightTaker,
)
from gpu_worker.models.vision.pixels import normalised, patches_of, places_of, resize
from gpu_worker.models.vision.processor import ImagePlan, Pixels
from gpu_worker.models.vision.tower import VisionTower
from gpu_worker.models.vision.vision_config import (
    CLIP_COLOURS,
    LOW_DETAIL_SIDE,
    VisionConfig,
    VisionFamily,
    VisionFiles,
    read_colours,
    read_rope_theta,
    read_side,
)
from kernels.activation import Activation, activate
from shared.media import Detail

_EPS = 1e-5
_RENAMED = ((r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),)


@dataclass(frozen=True, slots=True)
class RowsForm:
    """Images of any shape, row by row, no side longer than `max_side` pixels; a token is `unit` pixels wide."""

    placeholder: int
    row_end: int
    image_end: int
    unit: int
    merge: int
    max_side: int
    is_bidirectional: bool = False
    around: tuple[str, str] | None = None

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        most = min(self.max_side, LOW_DETAIL_SIDE) if detail == "low" else self.max_side
        shrink = max(height / most, width / most, 1)
        rows, columns = (max(1, -(-math.floor(side / shrink) // self.unit)) for side in (height, width))
        token_ids = [*([self.placeholder] * columns), self.row_end] * rows
        token_ids[-1] = self.image_end
        return ImagePlan(
            token_ids, (0, len(token_ids)), rows * columns, (rows, columns), rows * columns * self.merge**2
        )

    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """See `ImageForm`."""
        rows, columns = plan.patch_grid
        return resize(pixels, rows * self.unit, columns * self.unit, "bicubic")[None]


@dataclass(frozen=True, slots=True)
class _Embed:
    patches: Linear
    norm: Norm
    frequencies: torch.Tensor
    colours: torch.Tensor
    patch: int
    merge: int

    def __call__(self, values: torch.Tensor, grid: tuple[int, ...]) -> tuple[torch.Tensor, Neighbourhood]:
        mean, deviation = self.colours.to(values.device)
        patches = patches_of(normalised(values, mean, deviation), self.patch).flatten(2)
        stream = self.norm(self.patches(patches.to(self.patches.weight.dtype)))
        places = places_of(grid[0] * self.merge, grid[1] * self.merge)
        # Rows turn by every other frequency, columns by the others.
        frequencies = (self.frequencies[0::2], self.frequencies[1::2])
        turns = torch.cat(
            [place.to(values.device)[:, None] * each for place, each in zip(places, frequencies, strict=True)], 1
        )
        turns = turns.repeat(1, 2)
        return stream, Neighbourhood(turns.cos(), turns.sin())


@dataclass(frozen=True, slots=True)
class _Project:
    norm: Norm
    merging: Linear
    first: Linear
    second: Linear
    activation: Activation
    merge: int

    def __call__(self, stream: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        rows, columns = grid
        x = self.norm(stream[0]).view(rows, self.merge, columns, self.merge, -1)
        x = x.permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        return self.second(activate(self.first(self.merging(x)), self.activation))


@dataclass(frozen=True, slots=True)
class _Sizes:
    depth: int
    size: int
    inner: int
    heads: int
    patch: int
    merge: int
    hidden: int
    theta: float
    eps: float
    activation: Activation
    projector: Activation
    has_projector_bias: bool
    colours: torch.Tensor


def _read_sizes(files: VisionFiles) -> _Sizes:
    vision, whole = files.vision, files.whole
    return _Sizes(
        vision.integer("num_hidden_layers", 24, maximum=1024),
        vision.integer("hidden_size", 1024),
        vision.integer("intermediate_size", 4096),
        vision.integer("num_attention_heads", 16, maximum=1024),
        read_side(vision, "patch_size", 16),
        whole.integer("spatial_merge_size", 2, maximum=64),
        files.text.integer("hidden_size"),
        read_rope_theta(vision),
        files.text.number("rms_norm_eps", 1e-5),
        read_activation(vision, default="gelu"),
        read_activation(whole, "projector_hidden_act", "gelu"),
        whole.boolean("multimodal_projector_bias", False),
        read_colours(files.processor, *CLIP_COLOURS),
    )


def _layer(taker: WeightTaker, sizes: _Sizes, index: int) -> VisionLayer:
    name, size, inner = f"vision_tower.transformer.layers.{index}", sizes.size, sizes.inner
    attention = Attention(
        taker.linear([f"{name}.attention.{part}_proj" for part in "qkv"], [size] * 3, size, bias=False),
        taker.linear(f"{name}.attention.o_proj", size, size, bias=False),
        sizes.heads,
    )
    mlp = GatedMlp(
        taker.linear(f"{name}.feed_forward.gate_proj", inner, size, bias=False),
        taker.linear(f"{name}.feed_forward.up_proj", inner, size, bias=False),
        taker.linear(f"{name}.feed_forward.down_proj", size, inner, bias=False),
        sizes.activation,
    )
    norms = [taker.rms_norm(f"{name}.{part}_norm", size, _EPS) for part in ("attention", "ffn")]
    return VisionLayer(norms[0], attention, norms[1], mlp)


def _take(taker: WeightTaker, device: torch.device, sizes: _Sizes) -> VisionTower:
    size, patch, head_dim = sizes.size, sizes.patch, sizes.size // sizes.heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    embed = _Embed(
        taker.patches("vision_tower.patch_conv", size, patch, patch, bias=False),
        taker.rms_norm("vision_tower.ln_pre", size, _EPS),
        1.0 / sizes.theta**exponents,
        sizes.colours,
        patch,
        sizes.merge,
    )
    name, has_bias = "multi_modal_projector", sizes.has_projector_bias
    project = _Project(
        taker.rms_norm(f"{name}.norm", size, sizes.eps),
        taker.linear(f"{name}.patch_merger.merging_layer", size, size * sizes.merge**2, bias=False),
        taker.linear(f"{name}.linear_1", sizes.hidden, size, bias=has_bias),
        taker.linear(f"{name}.linear_2", sizes.hidden, sizes.hidden, bias=has_bias),
        sizes.projector,
        sizes.merge,
    )
    return VisionTower(embed, [_layer(taker, sizes, index) for index in range(sizes.depth)], project, device)


def _read(files: VisionFiles) -> VisionConfig:
    whole, processor, sizes = files.whole, files.processor, _read_sizes(files)
    layer = whole.fields.get("vision_feature_layer", -1)
    if layer != -1:
        raise whole.error("vision_feature_layer", f"is {layer!r}; supported: -1, the last layer")
    edges = processor.nested("size") or JsonFile(processor.path, {})
    max_side, unit = (
        edges.integer("longest_edge", read_side(files.vision, "image_size", 1024)),
        sizes.patch * sizes.merge,
    )
    token = whole.integer("image_token_index", whole.integer("image_token_id", 10))
    form = RowsForm(
        token, files.special_token("[IMG_BREAK]"), files.special_token("[IMG_END]"), unit, sizes.merge, max_side
    )
    most = -(-max_side // unit)
    return VisionConfig(
        form,
        token,
        sizes.depth,
        sizes.size,
        sizes.size * (4 * sizes.size + 3 * sizes.inner),
        most**2,
        (most * sizes.merge) ** 2,
        partial(_take, sizes=sizes),
        _RENAMED,
        r"(vision_tower|multi_modal_projector)\.",
    )


FAMILIES = (VisionFamily(("Mistral3ForConditionalGeneration",), _read),)
