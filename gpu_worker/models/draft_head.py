"""The head that predicts further tokens (MTP, NextN), which some checkpoints hold beside their model.

It joins the embedding of a token with the hidden vector before it, each normalised, and passes them through one more
layer of the model's own kind. Embedding and vocabulary head are the model's.

Source: DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.json_file import JsonFile

NEXTN_FIELD, MTP_FIELD = "num_nextn_predict_layers", "mtp_num_hidden_layers"


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Where a family's checkpoints have the head, and what it is called there.

    Attributes:
        count: How many there are, of which the first is served; None where the configuration does not tell.
        field: The field of `count`.
        prefix, layer: Module names of the head and of its layer.
        projection: From both vectors, the token's first, to the residual stream.
        final_norm: The normalisation before the vocabulary head.
        hands_on_normed: The head's input for the next token is its output behind `final_norm`.
        copied: Modules below `prefix` that are copies of the model's own.
        own_layer: What its layer consists of; None is `draft_layer()`.
    """

    count: int | None
    field: str
    prefix: str
    layer: str
    projection: str
    token_norm: str
    hidden_norm: str
    final_norm: str
    hands_on_normed: bool
    copied: tuple[str, ...] = ()
    own_layer: LayerTraits | None = None


def read_nextn(file: JsonFile) -> DraftHead:
    """Read what DeepSeek and GLM have: a layer behind the model's last one."""
    prefix = f"model.layers.{file.integer('num_hidden_layers', maximum=1024)}"
    return DraftHead(
        count=file.integer(NEXTN_FIELD, 0, minimum=0, maximum=64),
        field=NEXTN_FIELD,
        prefix=prefix,
        layer=prefix,
        projection="eh_proj",
        token_norm="enorm",
        hidden_norm="hnorm",
        final_norm="shared_head.norm",
        hands_on_normed=False,
        copied=("embed_tokens", "shared_head.head"),
    )


def nextn_tensors(file: JsonFile) -> tuple[str, ...]:
    """Return patterns of the tensors of such layers, which the model itself does not have."""
    first, count = file.integer("num_hidden_layers", maximum=1024), file.integer(NEXTN_FIELD, 0, minimum=0, maximum=64)
    return tuple(rf"model\.layers\.{first + number}\..*" for number in range(max(1, count)))


def read_mtp(file: JsonFile) -> DraftHead:
    """Read what Qwen has: modules of their own. Qwen3-Next's configuration does not count them."""
    return DraftHead(
        count=file.integer(MTP_FIELD, minimum=0, maximum=64) if MTP_FIELD in file.names() else None,
        field=MTP_FIELD,
        prefix="mtp",
        layer="mtp.layers.0",
        projection="fc",
        token_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        final_norm="norm",
        hands_on_normed=True,
        copied=("embed_tokens", "shared_head.head"),
    )


def draft_layer(layers: Sequence[LayerTraits]) -> LayerTraits:
    """Return the draft layer: attention of the last layer that attends, and the model's experts or last block."""
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionShape | LatentShape)]
    mixtures = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MixtureShape)]
    return LayerTraits(mixers[-1], mixtures[-1] if mixtures else layers[-1].feed_forward)
