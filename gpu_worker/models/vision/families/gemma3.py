"""Gemma 3: a SigLIP tower that reads images in one size, whose tokens attend to one another in both directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from gpu_worker.models.vision.embedding import PatchEmbedding, tile_positions
from gpu_worker.models.vision.forms import SquareForm
from gpu_worker.models.vision.parts import Linear, Merge, Projector, VisionLayer
from gpu_worker.models.vision.vision_config import (
    PLAIN_COLOURS,
    VisionConfig,
    VisionFamily,
    VisionFiles,
    read_side,
    read_sizes,
)
from gpu_worker.models.vision.weights import TowerSizes, WeightTaker

_RENAMED = (
    (r"^(model\.)?vision_tower\.(vision_model\.)?", "vision_tower."),
    (r"^model\.multi_modal_projector\.", "multi_modal_projector."),
)
_SPELLED = ("<start_of_image>", "\n\n<start_of_image>\n\n")


@dataclass(frozen=True, slots=True)
class _Parts:
    sizes: TowerSizes
    num_patches: int

    def embedding(self, taker: WeightTaker) -> PatchEmbedding:
        name = "vision_tower.embeddings"
        taker.checkpoint.discard(rf"vision_tower\.head\..*|{name}\.position_ids")
        positions = taker.checkpoint.take(f"{name}.position_embedding.weight", self.num_patches, self.sizes.size)
        patches = taker.patches(f"{name}.patch_embedding", self.sizes, bias=True)
        return PatchEmbedding(patches, self.sizes, partial(tile_positions, positions))

    def layer(self, taker: WeightTaker, index: int) -> VisionLayer:
        return taker.siglip_layer(f"vision_tower.encoder.layers.{index}", self.sizes)

    def projector(self, taker: WeightTaker) -> Projector:
        name, size, eps = "multi_modal_projector", self.sizes.size, self.sizes.eps
        projection = taker.checkpoint.take(f"{name}.mm_input_projection_weight", size, self.sizes.hidden)
        return Projector(
            (
                taker.layer_norm("vision_tower.post_layernorm", size, eps),
                Merge(self.sizes.merge**2, is_mean=True),
                taker.rms_norm(f"{name}.mm_soft_emb_norm", size, eps, is_offset=True),
                Linear(projection.T.contiguous()),
            )
        )


def _read(files: VisionFiles) -> VisionConfig:
    vision, whole = files.vision, files.whole
    count, side = whole.integer("mm_tokens_per_image", 256, maximum=1 << 16), read_side(vision, "image_size", 224)
    patches = side // read_side(vision, "patch_size", 16)
    merge, rest = divmod(patches, math.isqrt(count))
    if rest or not merge or math.isqrt(count) ** 2 != count:
        raise whole.error("mm_tokens_per_image", f"is {count}; its root must divide the {patches} patches of a side")
    activation = ("hidden_act", "gelu_pytorch_tanh")
    sizes = read_sizes(
        files, merge, depth=12, size=768, inner=3072, heads=12, activation=activation, colours=PLAIN_COLOURS
    )
    form = SquareForm(
        whole.integer("image_token_index", whole.integer("image_token_id", 262_144)),
        whole.integer("boi_token_index", 255_999),
        whole.integer("eoi_token_index", 256_000),
        side,
        count,
        patches**2,
        is_bidirectional=True,
        around=_SPELLED,
    )
    return VisionConfig(form, _Parts(sizes, patches**2), _RENAMED, r"(vision_tower|multi_modal_projector)\.")


FAMILIES = (VisionFamily(("Gemma3ForConditionalGeneration",), _read),)
