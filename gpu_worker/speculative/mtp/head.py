"""The head that a checkpoint holds beside its model (MTP, NextN), as a layer that predicts hidden vectors.

Entry `i` of its KV cache is made from hidden vector `i` and token `i + 1`. The entry is a row of latent vectors where
the model attends by those, else keys and values of the model's own sizes. Behind the first draft token the head reads
what it yielded itself: a head that was trained to predict one token drafts any number.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path

import torch

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.layer_source import LayerSource, QuantizedLayers
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.mlp import GatedShape
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.vocabulary import Embedding
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.draft_head import DraftHead, draft_layer
from gpu_worker.models.loader import CACHE_SCALES, StoredWeights, open_weights
from gpu_worker.speculative.hidden_vectors.layer import DraftLayer, DraftLayerWeights, LayerHead, NormedJoin
from kernels.linear.dense import keeps_half


def head_config(model: ModelConfig) -> ModelConfig:
    """Return the sizes and options of the head's layer, as a model of one layer."""
    layer = _described(model).own_layer or draft_layer(model.layers)
    return dataclasses.replace(model, num_layers=1, layers=(layer,), tapped_layers=())


def open_head(directory: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> StoredWeights:
    """Open the head's tensors without its copies of the model's, a context manager; may raise `CheckpointError`."""
    head, names = _described(model), model.block.names
    prefix = re.escape(head.prefix)
    # Those of the model, of further heads, and copies of the model's.
    others = (rf"(?!{prefix}\.).*", rf"{prefix}\.layers\.[1-9].*", *(rf"{prefix}\.{name}\..*" for name in head.copied))
    own = TensorNames(renamed=names.renamed, unused=(*others, r".*\.rotary_emb\.inv_freq"))
    return open_weights(
        directory, dtype, device, keeps_half=partial(keeps_half, inputs=dtype, device=device), names=own
    )


def load_head(directory: Path, model: CausalLM, dtype: torch.dtype | None = None) -> DraftLayer:
    """Load the head beside `model`, in `dtype` or else the model's; `CheckpointError` if a tensor is malformed."""
    dtype = dtype or model.dtype
    config = head_config(model.config)
    with open_head(directory, model.config, dtype, model.device) as checkpoint:
        method = config.quantization
        quantized = None if method is None else QuantizedLayers(method, checkpoint)
        weights = _take_head(config, config.layer_source(checkpoint, quantized), model, dtype)
        checkpoint.discard(rf".*\.{CACHE_SCALES}")
        checkpoint.check_all_taken()
    return DraftLayer(config, weights, model.linears, _relative_cost(config.layer(0), model.config))


def _take_head(config: ModelConfig, source: LayerSource, model: CausalLM, dtype: torch.dtype) -> DraftLayerWeights:
    head = _described(config)
    size, name = config.hidden_size, f"{head.prefix}.{{}}".format
    inputs = NormedJoin(
        source.projections.take([name(head.projection)], [size], 2 * size),
        source.norm(name(head.token_norm)),
        source.norm(name(head.hidden_norm)),
    )
    layer = config.layer(0).take(source, head.layer)
    final_norm = source.norm(name(head.final_norm))
    rotations = Rotations(config.ropes, config.max_model_len, model.device, is_lazy=True)
    scores = LayerHead(model.head_in(dtype), final_norm.weight, hands_on_normed=head.hands_on_normed)
    return DraftLayerWeights(Embedding(model.embedding, dtype), inputs, layer, scores, config.rms_norm_eps, rotations)


def _described(config: ModelConfig) -> DraftHead:
    assert config.draft_head is not None, "the recipe has refused models without a head"
    return config.draft_head


def _relative_cost(layer: LayerTraits, model: ModelConfig) -> float:
    """Return what a pass takes as a share of a step, by the weights that one token reads; layers count as alike."""
    size, scores = model.hidden_size, model.hidden_size * model.vocab_size
    one = size * (_num_mixed(layer) + 3 * _num_inner(layer))
    return (2 * size**2 + one + scores) / (model.num_layers * one + scores)


def _num_mixed(layer: LayerTraits) -> int:
    """Return the features of attention that are projected from and to the stream, about so."""
    mixer = layer.mixer
    if isinstance(mixer, AttentionShape):
        return mixer.head_dim * (2 * (mixer.num_heads + mixer.num_kv_heads) + mixer.num_heads * mixer.output_gate)
    assert isinstance(mixer, LatentShape)
    return mixer.key_dim + mixer.num_heads * (mixer.plain_dim + mixer.rotary_dim + mixer.value_dim)


def _num_inner(layer: LayerTraits) -> int:
    block = layer.feed_forward
    if isinstance(block, MixtureShape):
        return block.rule.top_k * block.expert_size + block.shared_size
    assert isinstance(block, GatedShape)
    return block.inner_size
