"""Qwen 2.5-VL, Qwen 3-VL, and the towers of Qwen 3.5 and 3.6.

Images keep their shape: they are brought to a multiple of a patch within bounds of their number of pixels. Four
neighbouring patches become one token. Positions of text have three axes, of which an image's tokens use two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gpu_worker.models.config import read_activation
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rope_config import rope_fields
from gpu_worker.models.vision.parts import (
    Attention,
    GatedMlp,
    Linear,
    Neighbourhood,
    Norm,
    PlainMlp,
    VisionLayer,
    WeightTaker,
)
from gpu_worker.models.vision.pixels import normalised, patches_of, places_of, resize
from gpu_worker.models.vision.processor import ImagePlan, Pixels
from gpu_worker.models.vision.tower import Project, VisionTower
from gpu_worker.models.vision.vision_config import (
    CLIP_COLOURS,
    LOW_DETAIL_SIDE,
    VisionConfig,
    VisionFamily,
    VisionFiles,
    read_colours,
)
from kernels.activation import Activation
from shared.errors import BadRequestError
from shared.media import Detail

MAX_ASPECT = 200
_EPS = 1e-6
_THETA = 10000.0
_RENAMED = ((r"^model\.visual\.", "visual."),)


@dataclass(frozen=True, slots=True)
class DynamicForm:
    """Images of any shape, of which the tower reads from `min_pixels` to `max_pixels`."""

    placeholder: int
    patch_size: int
    merge: int
    min_pixels: int
    max_pixels: int
    is_bidirectional: bool = False
    around: tuple[str, str] | None = None

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        if max(width, height) > MAX_ASPECT * min(width, height):
            problem = f"An image has {width}x{height} pixels; one side may be {MAX_ASPECT} times the other at most."
            raise BadRequestError(problem, "messages")
        most = max(self.min_pixels, min(self.max_pixels, LOW_DETAIL_SIDE**2)) if detail == "low" else self.max_pixels
        unit = self.patch_size * self.merge
        rows, columns = (side // unit for side in _fitted(height, width, unit, self.min_pixels, most))
        count = rows * columns
        grid = (rows * self.merge, columns * self.merge)
        return ImagePlan([self.placeholder] * count, (0, count), count, grid, grid[0] * grid[1], (rows, columns))

    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """See `ImageForm`."""
        rows, columns = plan.patch_grid
        return resize(pixels, rows * self.patch_size, columns * self.patch_size, "bicubic")[None]


def _fitted(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Return the height and width nearest to an image's that are multiples of `unit` and within bounds of pixels."""
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows = max(unit, math.floor(height / shrink / unit) * unit)
        columns = max(unit, math.floor(width / shrink / unit) * unit)
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / unit) * unit for side in (height, width))
    return rows, columns


@dataclass(frozen=True, slots=True)
class _Sizes:
    depth: int
    size: int
    inner: int
    heads: int
    patch: int
    frames: int
    merge: int
    out: int
    activation: Activation
    colours: torch.Tensor


def _read_sizes(files: VisionFiles, activation: str, patch: int) -> _Sizes:
    vision = files.vision
    if vision.integer("in_channels", 3) != 3:
        raise vision.error("in_channels", "must be 3: red, green and blue")
    return _Sizes(
        vision.integer("depth", maximum=1024),
        vision.integer("hidden_size"),
        vision.integer("intermediate_size"),
        vision.integer("num_heads", 16, maximum=1024),
        vision.integer("patch_size", patch, maximum=1024),
        vision.integer("temporal_patch_size", 2, maximum=64),
        vision.integer("spatial_merge_size", 2, maximum=64),
        vision.integer("out_hidden_size"),
        read_activation(vision, default=activation),
        read_colours(files.processor, *CLIP_COLOURS),
    )


def _read_form(files: VisionFiles, sizes: _Sizes) -> DynamicForm:
    processor, edges = files.processor, files.processor.nested("size") or JsonFile(files.processor.path, {})
    least = processor.integer("min_pixels", edges.integer("shortest_edge", 56 * 56))
    most = processor.integer("max_pixels", edges.integer("longest_edge", 28 * 28 * 1280))
    if least > most:
        raise processor.error("min_pixels", f"is {least}; it must be at most max_pixels ({most})")
    token = files.whole.integer("image_token_id", minimum=0)
    return DynamicForm(token, sizes.patch, sizes.merge, least, most)


def _contiguous_axes(sections: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(index % 3 for index, length in enumerate(sections) for _ in range(length))


def _interleaved_axes(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of pairs that take turns, as long as an axis has pairs left; the first axis has the rest."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, min(sections[axis] * 3, len(axes)), 3):
            axes[pair] = axis
    return tuple(axes)


def _sections(text: JsonFile, default: tuple[int, int, int]) -> tuple[int, ...]:
    fields = rope_fields(text)
    sections = fields.integers("mrope_section") or default
    if len(sections) != 3:
        raise fields.error("mrope_section", f"has {len(sections)} numbers; it must have 3, one for each axis")
    return sections


@dataclass(frozen=True, slots=True)
class _Embed:
    """Patches, each with its learned position if there are such, and where they are."""

    sizes: _Sizes
    patches: Linear
    frequencies: torch.Tensor
    positions: torch.Tensor | None = None
    window: int | None = None

    def __call__(self, values: torch.Tensor, grid: tuple[int, ...]) -> tuple[torch.Tensor, Neighbourhood]:
        sizes, device = self.sizes, values.device
        mean, deviation = sizes.colours.to(device)
        patches = patches_of(normalised(values, mean, deviation), sizes.patch, sizes.merge)
        # A still image is the same in all frames.
        patches = patches[:, :, :, None].expand(-1, -1, -1, sizes.frames, -1, -1).flatten(2)
        stream = self.patches(patches.to(self.patches.weight.dtype))
        rows, columns = (places.to(device) for places in places_of(grid[0], grid[1], sizes.merge))
        if self.positions is not None:
            stream = stream + _resampled(self.positions, rows, columns, grid).to(stream.dtype)
        turns = torch.cat([places[:, None] * self.frequencies for places in (rows, columns)], 1).repeat(1, 2)
        if self.window is None:
            return stream, Neighbourhood(turns.cos(), turns.sin())
        order, segments = _windows(grid, sizes.merge, self.window)
        order = order.to(device)
        return stream[:, order], Neighbourhood(turns[order].cos(), turns[order].sin(), segments)


def _resampled(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """Interpolate learned positions: `[num_patches, size]` from a square grid `table: [side * side, size]`."""
    side = math.isqrt(len(table))
    result = torch.zeros((), device=table.device)
    taps = []
    for places, count in ((rows, grid[0]), (columns, grid[1])):
        exact = places.float() * (side - 1) / max(count - 1, 1)
        low = exact.floor()
        share = exact - low
        low = low.long()
        taps.append(((low, 1 - share), ((low + 1).clamp(max=side - 1), share)))
    for row, row_share in taps[0]:
        for column, column_share in taps[1]:
            result = result + table[row * side + column] * (row_share * column_share)[:, None]
    return result


def _windows(grid: tuple[int, ...], merge: int, window: int) -> tuple[torch.Tensor, list[int]]:
    """Return the order of patches in which those of a window stand together, and each window's number of patches."""
    rows, columns = grid[0] // merge, grid[1] // merge
    places = torch.arange(rows * columns).view(rows, columns)
    parts = [part.flatten() for row in torch.split(places, window) for part in torch.split(row, window, 1)]
    order = torch.cat(parts)[:, None] * merge**2 + torch.arange(merge**2)
    return order.flatten(), [len(part) * merge**2 for part in parts]


@dataclass(frozen=True, slots=True)
class _Merger:
    """From neighbouring patches, normalised each or as one, to a token's embedding."""

    norm: Norm
    inner: Linear
    outer: Linear
    merged: int
    is_normed_after: bool = False
    window: int | None = None

    def __call__(self, stream: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        x = stream[0]
        x = self.norm(x.view(-1, self.merged)) if self.is_normed_after else self.norm(x).view(-1, self.merged)
        rows = self.outer(torch.nn.functional.gelu(self.inner(x)))
        if self.window is None:
            return rows
        merge = math.isqrt(self.merged // stream.shape[-1])
        order, _ = _windows((grid[0] // merge, grid[1] // merge), 1, self.window)
        return rows[order.argsort().to(rows.device)]


def _frequencies(sizes: _Sizes, device: torch.device) -> torch.Tensor:
    axis = sizes.size // sizes.heads // 2
    return 1.0 / _THETA ** (torch.arange(0, axis, 2, dtype=torch.float32, device=device) / axis)


def _attention(taker: WeightTaker, name: str, sizes: _Sizes, *, is_local: bool = False) -> Attention:
    qkv = taker.linear(f"{name}.qkv", 3 * sizes.size, sizes.size, bias=True)
    output = taker.linear(f"{name}.proj", sizes.size, sizes.size, bias=True)
    return Attention(qkv, output, sizes.heads, is_local=is_local)


def _read_2_5(files: VisionFiles) -> VisionConfig:
    vision = files.vision
    sizes = _read_sizes(files, "silu", 14)
    window = vision.integer("window_size", 112) // sizes.patch // sizes.merge
    whole = frozenset(vision.integers("fullatt_block_indexes"))

    def take(taker: WeightTaker, device: torch.device) -> VisionTower:
        def layer(index: int) -> VisionLayer:
            name = f"visual.blocks.{index}"
            mlp = GatedMlp(
                taker.linear(f"{name}.mlp.gate_proj", sizes.inner, sizes.size, bias=True),
                taker.linear(f"{name}.mlp.up_proj", sizes.inner, sizes.size, bias=True),
                taker.linear(f"{name}.mlp.down_proj", sizes.size, sizes.inner, bias=True),
                sizes.activation,
            )
            attention = _attention(taker, f"{name}.attn", sizes, is_local=index not in whole)
            norms = [taker.rms_norm(f"{name}.norm{number}", sizes.size, _EPS) for number in (1, 2)]
            return VisionLayer(norms[0], attention, norms[1], mlp)

        shape = (sizes.frames, sizes.patch, sizes.patch)
        patches = taker.patches("visual.patch_embed.proj", sizes.size, *shape, bias=False)
        embed = _Embed(sizes, patches, _frequencies(sizes, device), window=window)
        layers = [layer(index) for index in range(sizes.depth)]
        merged = sizes.size * sizes.merge**2
        project = _Merger(
            taker.rms_norm("visual.merger.ln_q", sizes.size, _EPS),
            taker.linear("visual.merger.mlp.0", merged, merged, bias=True),
            taker.linear("visual.merger.mlp.2", sizes.out, merged, bias=True),
            merged,
            window=window,
        )
        return VisionTower(embed, layers, project, device)

    axes = _contiguous_axes(_sections(files.text, (16, 24, 24)))
    weights = sizes.size * (4 * sizes.size + 3 * sizes.inner)
    return _config(files, sizes, weights, take, axes)


def _config(
    files: VisionFiles,
    sizes: _Sizes,
    layer_weights: int,
    take: Callable[[WeightTaker, torch.device], VisionTower],
    axes: tuple[int, ...],
    num_deep: int = 0,
) -> VisionConfig:
    form = _read_form(files, sizes)
    max_patches = form.max_pixels // sizes.patch**2
    return VisionConfig(
        form,
        form.placeholder,
        sizes.depth,
        sizes.size,
        layer_weights,
        max_patches // sizes.merge**2,
        max_patches,
        take,
        _RENAMED,
        r"visual\.",
        axes,
        num_deep,
    )


def _take_3(taker: WeightTaker, device: torch.device, sizes: _Sizes, side: int, deep: tuple[int, ...]) -> VisionTower:
    merged = sizes.size * sizes.merge**2

    def layer(index: int) -> VisionLayer:
        name = f"visual.blocks.{index}"
        inner = taker.linear(f"{name}.mlp.linear_fc1", sizes.inner, sizes.size, bias=True)
        outer = taker.linear(f"{name}.mlp.linear_fc2", sizes.size, sizes.inner, bias=True)
        norms = [taker.layer_norm(f"{name}.norm{number}", sizes.size, _EPS) for number in (1, 2)]
        attention = _attention(taker, f"{name}.attn", sizes)
        return VisionLayer(norms[0], attention, norms[1], PlainMlp(inner, outer, sizes.activation))

    def merger(name: str, *, is_normed_after: bool) -> Project:
        norm = taker.layer_norm(f"{name}.norm", merged if is_normed_after else sizes.size, _EPS)
        inner = taker.linear(f"{name}.linear_fc1", merged, merged, bias=True)
        outer = taker.linear(f"{name}.linear_fc2", sizes.out, merged, bias=True)
        return _Merger(norm, inner, outer, merged, is_normed_after)

    shape = (sizes.frames, sizes.patch, sizes.patch)
    patches = taker.patches("visual.patch_embed.proj", sizes.size, *shape, bias=True)
    positions = taker.checkpoint.take("visual.pos_embed.weight", side * side, sizes.size)
    embed = _Embed(sizes, patches, _frequencies(sizes, device), positions)
    layers = [layer(index) for index in range(sizes.depth)]
    further = {
        index: merger(f"visual.deepstack_merger_list.{number}", is_normed_after=True)
        for number, index in enumerate(deep)
    }
    return VisionTower(embed, layers, merger("visual.merger", is_normed_after=False), device, further)


def _read_3(files: VisionFiles, sections: tuple[int, int, int], deep: tuple[int, ...] = ()) -> VisionConfig:
    vision = files.vision
    sizes = _read_sizes(files, "gelu_pytorch_tanh", 16)
    count = vision.integer("num_position_embeddings", 2304)
    side = math.isqrt(count)
    if side * side != count:
        raise vision.error("num_position_embeddings", f"is {count}; it must be the square of a whole number")
    if "deepstack_visual_indexes" in vision.names():
        deep = vision.integers("deepstack_visual_indexes")
    axes = _interleaved_axes(_sections(files.text, sections))
    take = partial(_take_3, sizes=sizes, side=side, deep=deep)
    return _config(files, sizes, sizes.size * (4 * sizes.size + 2 * sizes.inner), take, axes, len(deep))


FAMILIES = (
    VisionFamily(("Qwen2_5_VLForConditionalGeneration",), _read_2_5),
    VisionFamily(
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        partial(_read_3, sections=(24, 20, 20), deep=(8, 16, 24)),
    ),
    VisionFamily(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        partial(_read_3, sections=(11, 11, 10)),
    ),
)
