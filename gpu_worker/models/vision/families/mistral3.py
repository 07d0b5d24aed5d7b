"""The Pixtral tower of Mistral Small 3.1 and 3.2 and Ministral 3: images keep their shape, rows end with a token."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.models.config import read_activation
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.vision.embedding import PatchEmbedding, frequencies
from gpu_worker.models.vision.forms import RowsForm
from gpu_worker.models.vision.parts import Linear, Merge, PlainMlp, Projector, VisionLayer
from gpu_worker.models.vision.vision_config import (
    VisionConfig,
    VisionFamily,
    VisionFiles,
    read_rope_theta,
    read_side,
    read_sizes,
)
from gpu_worker.models.vision.weights import TowerSizes, WeightTaker
from kernels.activation import Activation

_EPS = 1e-5
_RENAMED = ((r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),)


@dataclass(frozen=True, slots=True)
class _Parts:
    sizes: TowerSizes
    theta: float
    projector_activation: Activation
    has_projector_bias: bool

    def embedding(self, taker: WeightTaker) -> PatchEmbedding:
        turns = frequencies(self.sizes.head_dim, self.theta, taker.device)
        return PatchEmbedding(
            taker.patches("vision_tower.patch_conv", self.sizes, bias=False),
            self.sizes,
            turns=((0, turns[0::2]), (1, turns[1::2])),
            norm=taker.rms_norm("vision_tower.ln_pre", self.sizes.size, _EPS),
        )

    def layer(self, taker: WeightTaker, index: int) -> VisionLayer:
        name, sizes = f"vision_tower.transformer.layers.{index}", self.sizes
        heads = [f"{name}.attention.{part}_proj" for part in "qkv"]
        return VisionLayer(
            taker.rms_norm(f"{name}.attention_norm", sizes.size, _EPS),
            taker.attention(heads, f"{name}.attention.o_proj", sizes, bias=False),
            taker.rms_norm(f"{name}.ffn_norm", sizes.size, _EPS),
            taker.gated_mlp(f"{name}.feed_forward", sizes, bias=False),
        )

    def projector(self, taker: WeightTaker) -> Projector:
        name, sizes, has_bias = "multi_modal_projector", self.sizes, self.has_projector_bias
        merging = taker.linear(f"{name}.patch_merger.merging_layer", sizes.size, sizes.merged, bias=False)
        # The checkpoint has the patches of a token side by side for each number of a vector.
        by_patch = merging.weight.view(sizes.size, sizes.size, -1).transpose(1, 2).flatten(1)
        inner = taker.linear(f"{name}.linear_1", sizes.hidden, sizes.size, bias=has_bias)
        outer = taker.linear(f"{name}.linear_2", sizes.hidden, sizes.hidden, bias=has_bias)
        return Projector(
            (
                taker.rms_norm(f"{name}.norm", sizes.size, sizes.eps),
                Merge(sizes.merge**2),
                Linear(by_patch.contiguous()),
                PlainMlp(inner, outer, self.projector_activation),
            )
        )


def _read(files: VisionFiles) -> VisionConfig:
    whole, vision, processor = files.whole, files.vision, files.processor
    layer = whole.fields.get("vision_feature_layer", -1)
    if layer != -1:
        raise whole.error("vision_feature_layer", f"is {layer!r}; supported: -1, the last layer")
    merge = whole.integer("spatial_merge_size", 2, maximum=64)
    sizes = read_sizes(files, merge, eps=files.text.number("rms_norm_eps", 1e-6))
    edges = processor.nested("size") or JsonFile(processor.path, {})
    form = RowsForm(
        whole.integer("image_token_index", whole.integer("image_token_id", 10)),
        sizes.patch,
        merge,
        files.special_token("[IMG_BREAK]"),
        files.special_token("[IMG_END]"),
        edges.integer("longest_edge", read_side(vision, "image_size", 1024)),
    )
    activation = read_activation(whole, "projector_hidden_act", "gelu")
    parts = _Parts(sizes, read_rope_theta(vision), activation, whole.boolean("multimodal_projector_bias", False))
    return VisionConfig(form, parts, _RENAMED, r"(vision_tower|multi_modal_projector)\.", num_mlp_linears=3)


FAMILIES = (VisionFamily(("Mistral3ForConditionalGeneration",), _read),)
