"""SmolVLM, SmolVLM 2 and Idefics 3: an image is enlarged, cut into square tiles, and seen once more as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from gpu_worker.models.json_file import CheckpointError, JsonFile, read_small_file
from gpu_worker.models.vision.embedding import PatchEmbedding, tile_positions
from gpu_worker.models.vision.forms import CutForm
from gpu_worker.models.vision.parts import Merge, Projector, VisionLayer
from gpu_worker.models.vision.vision_config import (
    PLAIN_COLOURS,
    VisionConfig,
    VisionFamily,
    VisionFiles,
    read_side,
    read_sizes,
)
from gpu_worker.models.vision.weights import TowerSizes, WeightTaker

_MAX_SIDE = 4096
_RENAMED = ((r"^model\.(vision_model|connector)\.", r"\1."),)


@dataclass(frozen=True, slots=True)
class _Parts:
    sizes: TowerSizes
    patches_per_side: int

    def embedding(self, taker: WeightTaker) -> PatchEmbedding:
        name, count = "vision_model.embeddings", self.patches_per_side
        positions = taker.checkpoint.take(f"{name}.position_embedding.weight", count**2, self.sizes.size)
        patches = taker.patches(f"{name}.patch_embedding", self.sizes, bias=True)
        return PatchEmbedding(
            patches, self.sizes, partial(tile_positions, positions[_positions(count).to(taker.device)])
        )

    def layer(self, taker: WeightTaker, index: int) -> VisionLayer:
        return taker.siglip_layer(f"vision_model.encoder.layers.{index}", self.sizes)

    def projector(self, taker: WeightTaker) -> Projector:
        sizes = self.sizes
        last_norm = taker.layer_norm("vision_model.post_layernorm", sizes.size, sizes.eps)
        projection = taker.linear("connector.modality_projection.proj", sizes.hidden, sizes.merged, bias=False)
        return Projector((last_norm, Merge(sizes.merge**2), projection))


def _positions(count: int) -> torch.Tensor:
    """Return the position of each patch of a tile, `[count * count]`; rounding makes some neighbours share theirs."""
    bounds = torch.arange(1 / count, 1.0, 1 / count)
    places = (torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
    index = torch.bucketize(places, bounds, right=True)
    return (index[:, None] * count + index).flatten()


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


def _read_form(files: VisionFiles, sizes: TowerSizes, side: int) -> CutForm:
    processor, patches = files.processor, side // sizes.patch
    if not patches or patches % sizes.merge:
        problem = f"is {side}; its {patches} patches must be a multiple of scale_factor ({sizes.merge})"
        raise files.vision.error("image_size", problem)
    if (edge := _edge(processor, "max_image_size", side)) != side:
        raise processor.error("max_image_size", f"has longest_edge {edge}; it must be the tower's image_size ({side})")
    longest = _edge(processor, "size", 4 * side)
    # The shorter side is made even, and so may become the longer one.
    is_cut, most = processor.boolean("do_image_splitting", True), -(-(longest + longest % 2) // side)
    processor.require("do_pad", True, "images padded to sizes of the family")
    token = files.special_token
    places = [[token(f"<row_{r}_col_{c}>") for c in range(1, most + 1)] for r in range(1, most + 1)] if is_cut else []
    return CutForm(
        files.whole.integer("image_token_id", minimum=0),
        side,
        (patches // sizes.merge) ** 2,
        patches**2,
        token("<fake_token_around_image>"),
        token("<global-img>"),
        tuple(map(tuple, places)),
        *(_line_ends(files.whole) if is_cut else ((), ())),
        longest,
    )


def _read(files: VisionFiles) -> VisionConfig:
    sizes = read_sizes(
        files,
        files.whole.integer("scale_factor", 2, maximum=64),
        depth=12,
        size=1152,
        inner=3072,
        patch=32,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        colours=PLAIN_COLOURS,
    )
    side = read_side(files.vision, "image_size", 224)
    form, parts = _read_form(files, sizes, side), _Parts(sizes, side // sizes.patch)
    return VisionConfig(form, parts, _RENAMED, r"(vision_model|connector)\.")


FAMILIES = (VisionFamily(("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"), _read),)
