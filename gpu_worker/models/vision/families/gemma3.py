"""Gemma 3: a SigLIP tower that reads images in one size, whose tokens attend to one another in both directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from gpu_worker.models.config import read_activation
from gpu_worker.models.vision.parts import LayerNorm, Linear, Neighbourhood, RmsNorm, WeightTaker
from gpu_worker.models.vision.pixels import normalised, patches_of, resize
from gpu_worker.models.vision.processor import ImagePlan, Pixels
from gpu_worker.models.vision.tower import VisionTower
from gpu_worker.models.vision.vision_config import VisionConfig, VisionFamily, VisionFiles, read_colours, read_side
from kernels.activation import Activation
from shared.media import Detail

_RENAMED = (
    (r"^(model\.)?vision_tower\.(vision_model\.)?", "vision_tower."),
    (r"^model\.multi_modal_projector\.", "multi_modal_projector."),
)


@dataclass(frozen=True, slots=True)
class SquareForm:
    """Images of one size, whatever their shape; `placeholder` and `end` stand around the embeddings' tokens."""

    placeholder: int
    token: int
    end: int
    side: int
    num_rows: int
    num_patches: int
    is_bidirectional: bool = True
    around: tuple[str, str] | None = ("<start_of_image>", "\n\n<start_of_image>\n\n")

    def plan(self, width: int, height: int, detail: Detail) -> ImagePlan:
        """See `ImageForm`."""
        token_ids = [self.placeholder, *([self.token] * self.num_rows), self.end]
        return ImagePlan(token_ids, (1, 1 + self.num_rows), self.num_rows, (1, 1), self.num_patches)

    def resized(self, pixels: Pixels, plan: ImagePlan) -> Pixels:
        """See `ImageForm`."""
        return resize(pixels, self.side, self.side, "bilinear")[None]


@dataclass(frozen=True, slots=True)
class _Sizes:
    depth: int
    size: int
    inner: int
    heads: int
    patch: int
    side: int
    tokens_per_side: int
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
    """The mean of neighbouring patches, normalised and projected."""

    last_norm: LayerNorm
    norm: RmsNorm
    projection: torch.Tensor
    tokens_per_side: int

    def __call__(self, stream: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        x, count = self.last_norm(stream)[0], self.tokens_per_side
        pooled = math.isqrt(len(x)) // count
        x = x.view(count, pooled, count, pooled, -1).mean((1, 3)).flatten(0, 1)
        return self.norm(x) @ self.projection


def _take(taker: WeightTaker, device: torch.device, sizes: _Sizes) -> VisionTower:
    name, size, take = "vision_tower.embeddings", sizes.size, taker.checkpoint.take
    embed = _Embed(
        taker.patches(f"{name}.patch_embedding", size, sizes.patch, sizes.patch, bias=True),
        take(f"{name}.position_embedding.weight", (sizes.side // sizes.patch) ** 2, size),
        sizes.colours,
        sizes.patch,
    )
    taker.checkpoint.discard(r"vision_tower\.(head\..*|embeddings\.position_ids)")
    name = "multi_modal_projector"
    project = _Project(
        taker.layer_norm("vision_tower.post_layernorm", size, sizes.eps),
        taker.rms_norm(f"{name}.mm_soft_emb_norm", size, sizes.eps, is_offset=True),
        take(f"{name}.mm_input_projection_weight", size, sizes.hidden),
        sizes.tokens_per_side,
    )
    shape = (size, sizes.inner, sizes.heads, sizes.eps, sizes.activation)
    layers = [taker.siglip_layer(f"vision_tower.encoder.layers.{index}", *shape) for index in range(sizes.depth)]
    return VisionTower(embed, layers, project, device)


def _read(files: VisionFiles) -> VisionConfig:
    vision, whole = files.vision, files.whole
    count = whole.integer("mm_tokens_per_image", 256, maximum=1 << 16)
    sizes = _Sizes(
        vision.integer("num_hidden_layers", 12, maximum=1024),
        vision.integer("hidden_size", 768),
        vision.integer("intermediate_size", 3072),
        vision.integer("num_attention_heads", 12, maximum=1024),
        read_side(vision, "patch_size", 16),
        read_side(vision, "image_size", 224),
        math.isqrt(count),
        files.text.integer("hidden_size"),
        vision.number("layer_norm_eps", 1e-6),
        read_activation(vision, default="gelu_pytorch_tanh"),
        read_colours(files.processor, (0.5,) * 3, (0.5,) * 3),
    )
    patches = sizes.side // sizes.patch
    if sizes.tokens_per_side**2 != count or patches % sizes.tokens_per_side:
        raise whole.error("mm_tokens_per_image", f"is {count}; its root must divide the {patches} patches of a side")
    token = whole.integer("image_token_index", whole.integer("image_token_id", 262_144))
    form = SquareForm(
        whole.integer("boi_token_index", 255_999),
        token,
        whole.integer("eoi_token_index", 256_000),
        sizes.side,
        count,
        patches**2,
    )
    weights = sizes.size * (4 * sizes.size + 2 * sizes.inner)
    take, tensors = partial(_take, sizes=sizes), r"(vision_tower|multi_modal_projector)\."
    return VisionConfig(form, token, sizes.depth, sizes.size, weights, count, patches**2, take, _RENAMED, tensors)


FAMILIES = (VisionFamily(("Gemma3ForConditionalGeneration",), _read),)
