"""Takes the weights of an EAGLE layer from its checkpoint, whichever layout they are in."""

from __future__ import annotations

import torch

from gpu_worker.layers.attention import AttentionWeights
from gpu_worker.layers.embedding import Embedding
from gpu_worker.layers.gated_mlp import GatedWeights
from gpu_worker.layers.layer import LayerNorms, LayerWeights
from gpu_worker.layers.linear import Projection
from gpu_worker.layers.norms import NormWeights
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.vocabulary import LMHead
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.speculative.eagle.config import REMEDY, EagleConfig
from gpu_worker.speculative.hidden_vectors.form import DraftLayerWeights, LayerHead, PairNorms
from kernels.linear.forms import DenseWeight

_LAYER, _AUTHORS_THIRD = "layers.0", "midlayer"


def take_eagle_weights(
    config: EagleConfig, checkpoint: Checkpoint, model: CausalLM, dtype: torch.dtype
) -> DraftLayerWeights:
    """Take every weight of the layer but what makes one vector of several, in EAGLE-3.

    Raises:
        CheckpointError: One is missing, malformed, or of another model.
    """
    layer, is_third = config.layer, bool(config.tapped_layers)
    size = layer.hidden_size
    is_speculators = checkpoint.has(f"{_LAYER}.mlp.down_proj.weight")
    prefix = _AUTHORS_THIRD if is_third and not is_speculators else _LAYER
    if checkpoint.has("embed_tokens.weight"):
        embedding = checkpoint.take("embed_tokens.weight", layer.vocab_size, size)
    else:
        embedding = model.embedding.to(dtype)
    inputs: Projection | PairNorms
    norm, hidden_norm = f"{prefix}.input_layernorm.weight", f"{prefix}.hidden_norm.weight"
    eps, attention_norm = layer.rms_norm_eps, None
    if is_third:
        norms = checkpoint.take(norm, size), checkpoint.take(hidden_norm, size)
        inputs = PairNorms(*norms, config.is_stream_normed)
    else:
        inputs = take_projection(checkpoint, ["fc"], [size], 2 * size)
        attention_norm = NormWeights(checkpoint.take(norm, size), eps) if checkpoint.has(norm) else None
    taken = _take_layer(layer, checkpoint, prefix, attention_norm, 2 * size if is_third else size)
    max_len = min(layer.max_model_len, model.config.max_model_len)
    rotations = Rotations(layer.ropes, max_len, model.device, is_lazy=True)
    head = _take_head(config, checkpoint) if is_third else LayerHead(_model_head(model, dtype))
    return DraftLayerWeights(Embedding(embedding, dtype), inputs, taken, head, eps, rotations)


def take_projection(checkpoint: Checkpoint, names: list[str], rows: list[int], columns: int) -> Projection:
    """Take layers of the same input as one; they have biases where the checkpoint says so."""
    weight = checkpoint.take_rows([f"{name}.weight" for name in names], [(count, columns) for count in rows])
    bias = None
    if checkpoint.has(f"{names[0]}.bias"):
        bias = checkpoint.take_rows([f"{name}.bias" for name in names], [(count,) for count in rows])
    return Projection(DenseWeight(weight), bias)


def _take_layer(
    config: ModelConfig, checkpoint: Checkpoint, prefix: str, attention_norm: NormWeights | None, num_inputs: int
) -> LayerWeights:
    size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    heads = [count * dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    mixer = AttentionWeights(
        shape=config.attention_shape(0),
        qkv=take_projection(checkpoint, [f"{attention}.{part}_proj" for part in "qkv"], heads, num_inputs),
        output=take_projection(checkpoint, [f"{attention}.o_proj"], [size], heads[0]),
    )
    feed_forward = GatedWeights(
        gate_up=take_projection(checkpoint, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], size),
        down=take_projection(checkpoint, [f"{mlp}.down_proj"], [size], inner),
    )
    mlp_norm = NormWeights(checkpoint.take(f"{prefix}.post_attention_layernorm.weight", size), config.rms_norm_eps)
    return LayerWeights(mixer, feed_forward, LayerNorms(attention_norm, before_feed_forward=mlp_norm))


def _model_head(model: CausalLM, dtype: torch.dtype) -> Projection | LMHead:
    """Return the model's head: as a matrix where that is at hand, to be made into the form that suits the layer."""
    if model.config.tie_word_embeddings:
        return Projection(DenseWeight(model.embedding.to(dtype)))
    return model.head_in(dtype)


def _take_head(config: EagleConfig, checkpoint: Checkpoint) -> LayerHead:
    """Take the head of an EAGLE-3 layer; `d2t` holds what to add to a feature's number to have its token."""
    size, count = config.layer.hidden_size, config.num_features
    matrix, norm = take_projection(checkpoint, ["lm_head"], [count], size), checkpoint.take("norm.weight", size)
    if not checkpoint.has("d2t"):
        if count != config.layer.vocab_size:
            raise checkpoint.error("d2t", f"is missing, which tells the tokens of {count} features")
        return LayerHead(matrix, norm)
    added = checkpoint.take_raw("d2t")
    if added.shape != (count,) or added.is_floating_point():
        raise checkpoint.error("d2t", f"must be {count} whole numbers")
    token_ids = added.long() + torch.arange(count, device=added.device)
    if token_ids.min() < 0 or token_ids.max() >= config.layer.vocab_size:
        problem = f"leads to a token that is not one of the {config.layer.vocab_size} of the vocabulary"
        raise checkpoint.error("d2t", f"{problem}; {REMEDY}")
    return LayerHead(matrix, norm, token_ids.int())
