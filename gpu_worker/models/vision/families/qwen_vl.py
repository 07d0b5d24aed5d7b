"""Qwen 2.5-VL, Qwen 3-VL, and the towers of Qwen 3.5 and 3.6.

Images keep their shape: they are brought to a multiple of a patch within bounds of their number of pixels. Four
neighbouring patches become one token. Positions of text have three axes, of which an image's tokens use two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from gpu_worker.models.config import read_activation
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.rope_config import rope_fields
from gpu_worker.models.vision.embedding import PatchEmbedding, frequencies, stretched_positions
from gpu_worker.models.vision.forms import DynamicForm
from gpu_worker.models.vision.parts import Merge, PlainMlp, Projector, VisionLayer
from gpu_worker.models.vision.vision_config import CLIP_COLOURS, VisionConfig, VisionFamily, VisionFiles, read_colours
from gpu_worker.models.vision.weights import TowerSizes, WeightTaker
from kernels.activation import Activation

_EPS = 1e-6
_THETA = 10000.0
_RENAMED = ((r"^model\.visual\.", "visual."),)


def _read_sizes(files: VisionFiles, activation: str, patch: int) -> TowerSizes:
    vision = files.vision
    if vision.integer("in_channels", 3) != 3:
        raise vision.error("in_channels", "must be 3: red, green and blue")
    size, heads = vision.integer("hidden_size"), vision.integer("num_heads", 16, maximum=1024)
    return TowerSizes(
        vision.integer("depth", maximum=1024),
        size,
        vision.integer("intermediate_size"),
        heads,
        size // heads,
        vision.integer("patch_size", patch, maximum=1024),
        vision.integer("spatial_merge_size", 2, maximum=64),
        vision.integer("out_hidden_size"),
        _EPS,
        read_activation(vision, default=activation),
        read_colours(files.processor, CLIP_COLOURS),
    )


def _read_form(files: VisionFiles, sizes: TowerSizes) -> DynamicForm:
    processor, edges = files.processor, files.processor.nested("size") or JsonFile(files.processor.path, {})
    least = processor.integer("min_pixels", edges.integer("shortest_edge", 56 * 56))
    most = processor.integer("max_pixels", edges.integer("longest_edge", 28 * 28 * 1280))
    if least > most:
        raise processor.error("min_pixels", f"is {least}; it must be at most max_pixels ({most})")
    return DynamicForm(files.whole.integer("image_token_id", minimum=0), sizes.patch, sizes.merge, least, most)


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


def _embedding(
    taker: WeightTaker, sizes: TowerSizes, frames: int, side: int | None = None, window: int | None = None
) -> PatchEmbedding:
    """Take patches, with learned positions of `side` rows and columns if there are such."""
    has_positions = side is not None
    patches = taker.patches("visual.patch_embed.proj", sizes, bias=has_positions, frames=frames)
    turns = frequencies(sizes.head_dim // 2, _THETA, taker.device)
    positions = None
    if side is not None:
        positions = partial(
            stretched_positions, taker.checkpoint.take("visual.pos_embed.weight", side * side, sizes.size)
        )
    return PatchEmbedding(patches, sizes, positions, ((0, turns), (1, turns)), frames=frames, window=window)


@dataclass(frozen=True, slots=True)
class _Parts2_5:
    sizes: TowerSizes
    frames: int
    window: int
    whole: frozenset[int]

    def embedding(self, taker: WeightTaker) -> PatchEmbedding:
        return _embedding(taker, self.sizes, self.frames, window=self.window)

    def layer(self, taker: WeightTaker, index: int) -> VisionLayer:
        name, sizes = f"visual.blocks.{index}", self.sizes
        attention = taker.attention(f"{name}.attn.qkv", f"{name}.attn.proj", sizes, is_local=index not in self.whole)
        norms = [taker.rms_norm(f"{name}.norm{number}", sizes.size, _EPS) for number in (1, 2)]
        return VisionLayer(norms[0], attention, norms[1], taker.gated_mlp(f"{name}.mlp", sizes, bias=True))

    def projector(self, taker: WeightTaker) -> Projector:
        sizes, name = self.sizes, "visual.merger"
        mlp = PlainMlp(
            taker.linear(f"{name}.mlp.0", sizes.merged, sizes.merged, bias=True),
            taker.linear(f"{name}.mlp.2", sizes.hidden, sizes.merged, bias=True),
            Activation.GELU,
        )
        norm = taker.rms_norm(f"{name}.ln_q", sizes.size, _EPS)
        return Projector((norm, Merge(sizes.merge**2), mlp))


@dataclass(frozen=True, slots=True)
class _Parts3:
    sizes: TowerSizes
    frames: int
    side: int

    def embedding(self, taker: WeightTaker) -> PatchEmbedding:
        return _embedding(taker, self.sizes, self.frames, self.side)

    def layer(self, taker: WeightTaker, index: int) -> VisionLayer:
        name, sizes = f"visual.blocks.{index}", self.sizes
        norms = [taker.layer_norm(f"{name}.norm{number}", sizes.size, _EPS) for number in (1, 2)]
        attention = taker.attention(f"{name}.attn.qkv", f"{name}.attn.proj", sizes)
        return VisionLayer(norms[0], attention, norms[1], taker.plain_mlp(f"{name}.mlp.linear_fc", sizes))

    def projector(self, taker: WeightTaker) -> Projector:
        return self._merger(taker, "visual.merger")

    def deep(self, taker: WeightTaker, number: int) -> Projector:
        return self._merger(taker, f"visual.deepstack_merger_list.{number}", is_normed_after=True)

    def _merger(self, taker: WeightTaker, name: str, *, is_normed_after: bool = False) -> Projector:
        sizes, merge = self.sizes, Merge(self.sizes.merge**2)
        norm = taker.layer_norm(f"{name}.norm", sizes.merged if is_normed_after else sizes.size, _EPS)
        inner = taker.linear(f"{name}.linear_fc1", sizes.merged, sizes.merged, bias=True)
        outer = taker.linear(f"{name}.linear_fc2", sizes.hidden, sizes.merged, bias=True)
        mlp = PlainMlp(inner, outer, Activation.GELU)
        return Projector((merge, norm, mlp) if is_normed_after else (norm, merge, mlp))


def _read_2_5(files: VisionFiles) -> VisionConfig:
    vision, sizes = files.vision, _read_sizes(files, "silu", 14)
    window = vision.integer("window_size", 112) // sizes.patch // sizes.merge
    whole: tuple[int, ...] = (7, 15, 23, 31)
    if "fullatt_block_indexes" in vision.names():
        whole = vision.integers("fullatt_block_indexes")
    parts = _Parts2_5(sizes, vision.integer("temporal_patch_size", 2, maximum=64), window, frozenset(whole))
    axes = _contiguous_axes(_sections(files.text, (16, 24, 24)))
    return VisionConfig(
        _read_form(files, sizes),
        parts,
        _RENAMED,
        r"visual\.",
        3,
        axes,
        projector_weights=sizes.merged * (sizes.merged + sizes.hidden),
        windows=dict.fromkeys(set(range(sizes.depth)) - parts.whole, window**2 * sizes.merge**2),
    )


def _read_3(files: VisionFiles, sections: tuple[int, int, int], deep: tuple[int, ...] = ()) -> VisionConfig:
    vision, sizes = files.vision, _read_sizes(files, "gelu_pytorch_tanh", 16)
    count = vision.integer("num_position_embeddings", 2304)
    side = math.isqrt(count)
    if side * side != count:
        raise vision.error("num_position_embeddings", f"is {count}; it must be the square of a whole number")
    if "deepstack_visual_indexes" in vision.names():
        deep = vision.integers("deepstack_visual_indexes")
    parts = _Parts3(sizes, vision.integer("temporal_patch_size", 2, maximum=64), side)
    return VisionConfig(
        _read_form(files, sizes),
        parts,
        _RENAMED,
        r"visual\.",
        rotary_axes=_interleaved_axes(_sections(files.text, sections)),
        deep={index: partial(parts.deep, number=number) for number, index in enumerate(deep)},
        projector_weights=sizes.merged * (sizes.merged + sizes.hidden),
    )


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
