"""SmolVLM, SmolVLM 2 and Idefics 3: an image is enlarged, cut into square tiles, and seen once more as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch

from gpu_worker.models.config import read_activation
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile, read_small_file
from gpu_worker.models.vision.parts import LayerNorm, Linear, Neighbourhood, WeightTaker
from gpu_worker.models.vision.pixels import cut, merged, normalised, patches_of, resize
from gpu_worker.models.vision.processor import ImagePlan, Pixels
from gpu_worker.models.vision.tower import VisionTower
from gpu_worker.models.vision.vision_config import VisionConfig, VisionFamily, VisionFiles, read_colours, read_side
from kernels.activation import Activation
from shared.media import Detail

_MAX_SIDE = 4096
_RENAMED = ((r"^model\.(vision_model|connector)\.", r"\1."),)


@dataclass(frozen=True, slots=True)
class CutForm:
    """Tiles of `side` pixels, as many tokens each; the longer side of an image becomes `longest` pixels.

    Attributes:
        boundary: The token before each tile, and behind the last.
        whole: Says that the whole image follows.
        places: Say that the tile of a row and a column follows, `[row][column]`.
        row_end, last_row_end: What stands behind a row of tiles.
    """

    placeholder: int
    boundary: int
    whole: int
    places: tuple[tuple[int, ...], ...]
    row_end: tuple[int, ...]
    last_row_end: tuple[int, ...]
    side: int
    longest: int
    tokens_per_tile: int
    patches_per_tile: int
    is_cut: bool
    is_bidirectional: bool = False
    around: tuple[str, str] | None = None

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        rows, columns = self._tiles(width, height) if self.is_cut and detail != "low" else (0, 0)
        tile, token_ids = [self.placeholder] * self.tokens_per_tile, list[int]()
        for row in range(rows):
            for place in self.places[row][:columns]:
                token_ids += (self.boundary, place, *tile)
            token_ids += self.row_end if row < rows - 1 else self.last_row_end
        token_ids += (self.boundary, self.whole, *tile, self.boundary)
        count = rows * columns + 1
        num_rows, num_patches = count * self.tokens_per_tile, count * self.patches_per_tile
        return ImagePlan(token_ids, (0, len(token_ids)), num_rows, (rows, columns), num_patches, num_tiles=count)

    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """See `ImageForm`."""
        side, (rows, columns) = self.side, plan.patch_grid
        large = resize(pixels, *self._enlarged(pixels.shape[1], pixels.shape[0]), "lanczos")
        if not rows:
            return resize(large, side, side, "lanczos")[None]
        large = resize(large, rows * side, columns * side, "lanczos")
        return np.concatenate((cut(large, side), resize(large, side, side, "lanczos")[None]))

    def _enlarged(self, width: int, height: int) -> tuple[int, int]:
        """Return the height and width of an image whose longer side has become `longest`; the other one is even."""
        ratio, longest = width / height, self.longest
        if width >= height:
            height, width = int(longest / ratio), longest
            height += height % 2
        else:
            height, width = longest, int(longest * ratio)
            width += width % 2
        return max(height, 1), max(width, 1)

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return how many rows and columns of tiles hold the enlarged image; none if one does."""
        height, width = self._enlarged(width, height)
        ratio, side = width / height, self.side
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / ratio) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * ratio) / side)
        return (rows, columns) if rows * columns > 1 else (0, 0)


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
    colours: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Embed:
    patches: Linear
    positions: torch.Tensor
    colours: torch.Tensor
    patch: int

    def __call__(self, values: torch.Tensor, grid: tuple[int, ...]) -> tuple[torch.Tensor, Neighbourhood]:
        mean, deviation = self.colours.to(values.device)
        patches = patches_of(normalised(values, mean, deviation), self.patch).flatten(2)
        return self.patches(patches.to(self.patches.weight.dtype)) + self.positions, Neighbourhood()


@dataclass(frozen=True, slots=True)
class _Project:
    last_norm: LayerNorm
    projection: Linear
    merge: int

    def __call__(self, stream: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        return self.projection(merged(self.last_norm(stream), self.merge))


def _positions(count: int) -> torch.Tensor:
    """Return the position of each patch of a tile, `[count * count]`; rounding makes some neighbours share theirs."""
    bounds = torch.arange(1 / count, 1.0, 1 / count)
    places = (torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
    index = torch.bucketize(places, bounds, right=True)
    return (index[:, None] * count + index).flatten()


def _take(taker: WeightTaker, device: torch.device, sizes: _Sizes) -> VisionTower:
    name, size, count = "vision_model.embeddings", sizes.size, sizes.side // sizes.patch
    positions = taker.checkpoint.take(f"{name}.position_embedding.weight", count**2, size)
    embed = _Embed(
        taker.patches(f"{name}.patch_embedding", size, sizes.patch, sizes.patch, bias=True),
        positions[_positions(count).to(device)],
        sizes.colours,
        sizes.patch,
    )
    shape = (size, sizes.inner, sizes.heads, sizes.eps, sizes.activation)
    layers = [taker.siglip_layer(f"vision_model.encoder.layers.{index}", *shape) for index in range(sizes.depth)]
    projection = taker.linear("connector.modality_projection.proj", sizes.hidden, size * sizes.merge**2, bias=False)
    last_norm = taker.layer_norm("vision_model.post_layernorm", size, sizes.eps)
    return VisionTower(embed, layers, _Project(last_norm, projection, sizes.merge), device)


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary


def _line_ends(directory_file: JsonFile) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of one line end, and of two."""
    path = directory_file.path.parent / "tokenizer.json"
    try:
        vocab: Mapping[str, int] = msgspec.json.decode(read_small_file(path), type=_Tokenizer).model.vocab
    except (OSError, msgspec.DecodeError):
        raise CheckpointError(path, "has no vocabulary of texts") from None
    # Byte-level tokenizers write a line end so.
    one, two = next(((each, 2 * each) for each in ("Ċ", "\n") if each in vocab), ("", ""))
    if not one:
        raise CheckpointError(path, "has no token for the end of a line")
    return (vocab[one],), (vocab[two],) if two in vocab else (vocab[one],) * 2


def _edge(file: JsonFile, name: str, default: int) -> int:
    fields = file.nested(name) or JsonFile(file.path, {})
    return fields.integer("longest_edge", default, maximum=_MAX_SIDE)


def _read_form(files: VisionFiles, sizes: _Sizes) -> CutForm:
    processor, side = files.processor, sizes.side
    unit = sizes.patch * sizes.merge
    if side % unit or _edge(processor, "max_image_size", side) != side:
        raise files.vision.error("image_size", f"is {side}; it must be a multiple of {unit}, and that of the processor")
    longest = _edge(processor, "size", 4 * side)
    # The shorter side is made even, and so may become the longer one.
    is_cut, most = processor.boolean("do_image_splitting", True), -(-(longest + longest % 2) // side)
    if not (processor.boolean("do_resize", True) and processor.boolean("do_pad", True)):
        raise processor.error("do_resize", "is false; images of their own sizes are not read")
    token = files.special_token
    places = [[token(f"<row_{r}_col_{c}>") for c in range(1, most + 1)] for r in range(1, most + 1)] if is_cut else []
    return CutForm(
        files.whole.integer("image_token_id", minimum=0),
        token("<fake_token_around_image>"),
        token("<global-img>"),
        tuple(map(tuple, places)),
        *(_line_ends(files.whole) if is_cut else ((), ())),
        side,
        longest,
        (side // unit) ** 2,
        (side // sizes.patch) ** 2,
        is_cut,
    )


def _read(files: VisionFiles) -> VisionConfig:
    vision, whole = files.vision, files.whole
    sizes = _Sizes(
        vision.integer("num_hidden_layers", 12, maximum=1024),
        vision.integer("hidden_size", 1152),
        vision.integer("intermediate_size", 3072),
        vision.integer("num_attention_heads", 16, maximum=1024),
        read_side(vision, "patch_size", 32),
        read_side(vision, "image_size", 224),
        whole.integer("scale_factor", 2, maximum=64),
        files.text.integer("hidden_size"),
        vision.number("layer_norm_eps", 1e-6),
        read_activation(vision, default="gelu_pytorch_tanh"),
        read_colours(files.processor, (0.5,) * 3, (0.5,) * 3),
    )
    form = _read_form(files, sizes)
    count = 1 + max(1, len(form.places)) ** 2
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
        r"(vision_model|connector)\.",
    )


FAMILIES = (VisionFamily(("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"), _read),)
