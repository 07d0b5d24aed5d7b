"""The layer of EAGLE: it predicts the next hidden vector from a token and the hidden vector before that.

Entry `i` of its KV cache is made from hidden vector `i` and token `i + 1`, at position `i`; what it yields predicts
hidden vector `i + 1`, and the head scores token `i + 2` by it. EAGLE and EAGLE-2 read what the model's own head reads,
and use that head; EAGLE-3 reads several layers of the model, which `fc` makes one vector of, and has a smaller head.

Read from the layouts of the authors: `fc.weight`, `layers.0.…` without `input_layernorm`, and `embed_tokens.weight`
where it is not the model's; in EAGLE-3 `midlayer.…` with `hidden_norm`, `norm.weight`, `lm_head.weight` and `d2t`, or
`layers.0.…` as the `speculators` library calls it.

Source: Li et al., "EAGLE" (arXiv 2401.15077), section 4.1; the first layer has no normalisation before its attention,
as in the authors' code. "EAGLE-3" (arXiv 2503.01840), section 3.1.
"""

from __future__ import annotations

from pathlib import Path

import torch

from gpu_worker.layers.fused_decoder import fusing_library
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM, stack_shape
from gpu_worker.models.json_file import JsonFile
from gpu_worker.speculative.draft_files import open_draft_weights
from gpu_worker.speculative.eagle.config import EagleConfig, read_eagle_config
from gpu_worker.speculative.eagle.fused import FusedEagle, can_fuse
from gpu_worker.speculative.eagle.weights import take_eagle_weights, take_projection
from gpu_worker.speculative.hidden_vectors.form import DraftLayerWeights, LayerForm
from gpu_worker.speculative.hidden_vectors.layer import DraftLayer
from gpu_worker.speculative.hidden_vectors.layered import LayeredForm
from kernels.linear import Linear


def load_eagle_layer(directory: Path, model: CausalLM, dtype: torch.dtype | None = None) -> DraftLayer:
    """Load the layer that was trained for `model`, to compute in `dtype`, or else in the model's type.

    Raises:
        CheckpointError: A file, field or tensor is missing, malformed, or of another model.
    """
    config = read_eagle_config(JsonFile.read(directory / "config.json"), model.config)
    assert config.tapped_layers == model.config.tapped_layers
    dtype = dtype or model.dtype
    with open_draft_weights(directory, dtype, model.device) as checkpoint:
        layer = _take_layer(config, checkpoint, model, dtype)
        checkpoint.discard(r"lm_head\.weight|t2d|layers\.0\.self_attn\.rotary_emb\.inv_freq")
        checkpoint.check_all_taken()
    return layer


def _take_layer(config: EagleConfig, checkpoint: Checkpoint, model: CausalLM, dtype: torch.dtype) -> DraftLayer:
    """Take every weight that the configuration calls for; `model` has the embedding and head that are missing."""
    size = config.layer.hidden_size
    own = 2 * size**2 + _num_weights(config.layer) + size * config.num_features
    whole = model.config.num_layers * _num_weights(model.config) + size * model.config.vocab_size
    relative_cost = own * dtype.itemsize / (whole * model.embedding.dtype.itemsize)
    reduce: Linear | None = None
    if num_tapped := len(config.tapped_layers):
        projection = take_projection(checkpoint, ["fc"], [size], num_tapped * size)
        reduce = model.linears.make(projection.weight, projection.bias)
    form = _form(config.layer, take_eagle_weights(config, checkpoint, model, dtype), model)
    return DraftLayer(config.layer, form, dtype, model.device, relative_cost, reduce)


def _num_weights(config: ModelConfig) -> int:
    """Return how many numbers the matrices of a layer hold."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.hidden_size * (heads + 3 * config.intermediate_size)


def _form(config: ModelConfig, weights: DraftLayerWeights, model: CausalLM) -> LayerForm:
    """Choose the form: fused into one call where that can be had, else operation by operation."""
    shape = stack_shape(config)
    dtype = weights.embedding.dtype
    library = fusing_library(shape, dtype, model.device)
    if library is None or not can_fuse(weights.head, dtype):
        return LayeredForm(weights, model.linears)
    return FusedEagle(library, shape, weights)
