"""InternVL 3 and 3.5: an image is cut into square tiles; to several of them a small picture of the whole is added."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gpu_worker.models.config import read_activation
from gpu_worker.models.vision.embedding import PatchEmbedding, tile_positions
from gpu_worker.models.vision.forms import TilesForm
from gpu_worker.models.vision.parts import Merge, PlainMlp, Projector, Transform, VisionLayer
from gpu_worker.models.vision.vision_config import VisionConfig, VisionFamily, VisionFiles, read_side, read_sizes
from gpu_worker.models.vision.weights import TowerSizes, WeightTaker
from kernels.activation import Activation

_RENAMED = ((r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),)
_EPS = 1e-6
_PROJECTOR_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class _Parts:
    sizes: TowerSizes
    num_patches: int
    projector_activation: Activation
    has_bias: bool
    has_head_norms: bool
    has_positions: bool
    has_last_norm: bool
    is_rms: bool

    def embedding(self, taker: WeightTaker) -> PatchEmbedding:
        name, size, take = "vision_tower.embeddings", self.sizes.size, taker.checkpoint.take
        taker.checkpoint.discard(r"vision_tower\.embeddings\.mask_token")
        patches = taker.patches(f"{name}.patch_embeddings.projection", self.sizes, bias=True)
        first, positions = take(f"{name}.cls_token", 1, 1, size).flatten(), None
        if self.has_positions:
            table = take(f"{name}.position_embeddings", 1, self.num_patches + 1, size)
            first, positions = first + table[0, 0], partial(tile_positions, table[0, 1:])
        return PatchEmbedding(patches, self.sizes, positions, first=first)

    def layer(self, taker: WeightTaker, index: int) -> VisionLayer:
        name, sizes = f"vision_tower.encoder.layer.{index}", self.sizes

        def norm(part: str) -> Transform:
            if self.is_rms:
                return taker.rms_norm(f"{name}.layernorm_{part}", sizes.size, sizes.eps)
            return taker.layer_norm(f"{name}.layernorm_{part}", sizes.size, sizes.eps)

        norms = [
            taker.rms_norm(f"{name}.attention.{part}_norm", sizes.size, _EPS)
            for part in ("qk" if self.has_head_norms else "")
        ]
        attention = taker.attention(
            [f"{name}.attention.{part}_proj" for part in "qkv"],
            f"{name}.attention.projection_layer",
            sizes,
            bias=self.has_bias,
            output_bias=True,
            norms=norms,
        )
        scale, mlp_scale = (taker.checkpoint.take(f"{name}.lambda_{number}", sizes.size) for number in (1, 2))
        mlp = taker.plain_mlp(f"{name}.mlp.fc", sizes)
        return VisionLayer(norm("before"), attention, norm("after"), mlp, scale, mlp_scale)

    def projector(self, taker: WeightTaker) -> Projector:
        name, sizes = "multi_modal_projector", self.sizes
        steps: list[Transform] = [Merge(sizes.merge**2)]
        if self.has_last_norm:
            steps.insert(0, taker.layer_norm("vision_tower.layernorm", sizes.size, sizes.eps))
        steps.append(taker.layer_norm(f"{name}.layer_norm", sizes.merged, _PROJECTOR_EPS))
        inner = taker.linear(f"{name}.linear_1", sizes.hidden, sizes.merged, bias=True)
        outer = taker.linear(f"{name}.linear_2", sizes.hidden, sizes.hidden, bias=True)
        return Projector((*steps, PlainMlp(inner, outer, self.projector_activation)))


def _read_form(files: VisionFiles, sizes: TowerSizes, side: int) -> TilesForm:
    processor, unit = files.processor, sizes.patch * sizes.merge
    if side % unit:
        raise files.vision.error("image_size", f"is {side}; it must be a multiple of {unit}")
    # Published files say `crop_to_patches: false`, which `InternVLProcessor` never reads: it always cuts.
    most = processor.integer("max_patches", 12, maximum=1024)
    return TilesForm(
        files.whole.integer("image_token_id", minimum=0),
        side,
        (side // unit) ** 2,
        (side // sizes.patch) ** 2 + 1,
        files.special_token("<img>"),
        files.special_token("</img>"),
        min(most, processor.integer("min_patches", 1)),
        most,
    )


def _read(files: VisionFiles) -> VisionConfig:
    whole, vision = files.whole, files.vision
    layer, strategy = (whole.fields.get(f"vision_feature_{part}") for part in ("layer", "select_strategy"))
    if layer not in (-1, None) or strategy not in ("default", None):
        raise whole.error("vision_feature_layer", "must be -1, with vision_feature_select_strategy 'default'")
    side = read_side(vision, "image_size", 448)
    sizes = read_sizes(files, round(1 / whole.number("downsample_ratio", 0.5)), patch=14)
    parts = _Parts(
        sizes,
        (side // sizes.patch) ** 2,
        read_activation(whole, "projector_hidden_act", "gelu"),
        vision.boolean("attention_bias", False),
        vision.boolean("use_qk_norm", False),
        vision.boolean("use_absolute_position_embeddings", True),
        not vision.boolean("use_mean_pooling", True),
        vision.text("norm_type", "layer_norm") == "rms_norm",
    )
    form = _read_form(files, sizes, side)
    return VisionConfig(form, parts, _RENAMED, r"(vision_tower|multi_modal_projector)\.")


FAMILIES = (VisionFamily(("InternVLForConditionalGeneration",), _read),)
