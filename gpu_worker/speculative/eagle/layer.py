"""The layer of EAGLE: it predicts the next hidden vector from a token and the hidden vector before that.

Entry `i` of its KV cache is made from hidden vector `i` and token `i + 1`; what it yields predicts hidden vector
`i + 1`, and the head scores token `i + 2` by it. EAGLE and EAGLE-2 read what the model's own head reads, and use that
head; EAGLE-3 reads several layers of the model, which `fc` makes one vector of, and has a smaller head.

Source: Li et al., "EAGLE" (arXiv 2401.15077), section 4.1, without normalisation before attention, as in the authors'
code; "EAGLE-3" (arXiv 2503.01840), section 3.1.

In the `config.json`, EAGLE and EAGLE-2 have the fields of a Llama of one layer. EAGLE-3 adds those of its smaller
vocabulary and of the model's layers that it listens to; the `speculators` library nests the layer's own in
`transformer_layer_config`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.layers.attention import AttentionWeights
from gpu_worker.layers.layer import LayerNorms, LayerWeights
from gpu_worker.layers.linear import Projection
from gpu_worker.layers.mlp import GatedWeights
from gpu_worker.layers.norms import NormWeights
from gpu_worker.layers.rotations import Rotations
from gpu_worker.layers.vocabulary import Embedding, LMHead
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.families.llama import read_llama
from gpu_worker.models.json_file import JsonFile
from gpu_worker.speculative.draft_files import open_draft_weights
from gpu_worker.speculative.hidden_vectors.layer import DraftLayer, DraftLayerWeights, LayerHead, PairNorms
from kernels.linear import Linear
from kernels.linear.forms import DenseWeight

REMEDY = "take weights that were trained for this model"
_TAPPED = "eagle_aux_hidden_state_layer_ids"
_NESTED = "transformer_layer_config"
_NOT_SUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes and options of a layer.

    Attributes:
        layer: Of the one layer, with the model's vocabulary and length.
        tapped_layers: Layers of the model whose inputs EAGLE-3 reads; empty reads the head's input.
        num_features: Tokens that it can draft.
        is_stream_normed: Its residual stream begins with the normalised vector, in EAGLE-3.
    """

    layer: ModelConfig
    tapped_layers: tuple[int, ...]
    num_features: int
    is_stream_normed: bool = False


def is_third(file: JsonFile) -> bool:
    """Return whether a configuration is that of an EAGLE-3 layer."""
    kinds = (*file.texts("architectures"), file.text("speculators_model_type", ""))
    return "draft_vocab_size" in file.names() or any("eagle3" in kind.lower() for kind in kinds)


def read_eagle_config(file: JsonFile, model: ModelConfig) -> EagleConfig:
    """Read a layer's configuration; `CheckpointError` if a field is missing, not supported, or of another model."""
    nested = file.nested(_NESTED)
    fields = file if nested is None else nested
    layer = read_llama(fields)
    for name, found, needed in (
        ("num_hidden_layers", layer.num_layers, 1),
        ("hidden_size", layer.hidden_size, model.hidden_size),
        ("vocab_size", layer.vocab_size, model.vocab_size),
    ):
        if found != needed:
            raise fields.error(name, f"is {found}, but must be {needed}; {REMEDY}")
    layer = dataclasses.replace(layer, max_model_len=model.max_model_len)
    if not is_third(file):
        return EagleConfig(layer, (), layer.vocab_size)
    for name in _NOT_SUPPORTED:
        file.require(name, False)
    num_features = file.integer("draft_vocab_size", layer.vocab_size, maximum=layer.vocab_size)
    # As those who write either layout leave it out.
    is_stream_normed = file.boolean("norm_before_residual", nested is not None)
    return EagleConfig(layer, _tapped_layers(file, model.num_layers), num_features, is_stream_normed)


def _tapped_layers(file: JsonFile, num_layers: int) -> tuple[int, ...]:
    """Return those that the file names, or the three of the paper's authors: an early, the middle and a late one."""
    inner = file.nested("eagle_config")
    for fields in (file, inner):
        if fields is not None and _TAPPED in fields.names():
            layers = fields.token_ids(_TAPPED)
            if not layers or max(layers) >= num_layers or len(set(layers)) < len(layers):
                problem = f"is {list(layers)}; it must name different layers of the model, 0 to {num_layers - 1}"
                raise fields.error(_TAPPED, f"{problem}; {REMEDY}")
            return layers
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[2] > 0 or len(set(layers)) < 3:
        raise file.error(_TAPPED, f"is missing, and the usual layers do not exist in a model of {num_layers}")
    return layers


_LAYER, _AUTHORS_THIRD = "layers.0", "midlayer"


def load_eagle_layer(directory: Path, model: CausalLM, dtype: torch.dtype | None = None) -> DraftLayer:
    """Load the layer for `model`, in `dtype` or the model's; `CheckpointError` if malformed or of another model."""
    config = read_eagle_config(JsonFile.read(directory / "config.json"), model.config)
    assert config.tapped_layers == model.config.tapped_layers
    dtype = dtype or model.dtype
    with open_draft_weights(directory, dtype, model.device) as checkpoint:
        layer = _take_layer(config, checkpoint, model, dtype)
        checkpoint.discard(r"lm_head\.weight|t2d|layers\.0\.self_attn\.rotary_emb\.inv_freq")
        checkpoint.check_all_taken()
    return layer


def _take_layer(config: EagleConfig, checkpoint: Checkpoint, model: CausalLM, dtype: torch.dtype) -> DraftLayer:
    size = config.layer.hidden_size
    own = 2 * size**2 + _num_weights(config.layer) + size * config.num_features
    whole = model.config.num_layers * _num_weights(model.config) + size * model.config.vocab_size
    relative_cost = own * dtype.itemsize / (whole * model.embedding.dtype.itemsize)
    reduce: Linear | None = None
    if num_tapped := len(config.tapped_layers):
        projection = _take_projection(checkpoint, ["fc"], [size], num_tapped * size)
        reduce = model.linears.make(projection.weight, projection.bias)
    weights = _take_weights(config, checkpoint, model, dtype)
    return DraftLayer(config.layer, weights, model.linears, relative_cost, reduce)


def _num_weights(config: ModelConfig) -> int:
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.hidden_size * (heads + 3 * config.intermediate_size)


def _take_weights(
    config: EagleConfig, checkpoint: Checkpoint, model: CausalLM, dtype: torch.dtype
) -> DraftLayerWeights:
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
        inputs = _take_projection(checkpoint, ["fc"], [size], 2 * size)
        attention_norm = NormWeights(checkpoint.take(norm, size), eps) if checkpoint.has(norm) else None
    taken = _take_decoder_layer(layer, checkpoint, prefix, attention_norm, 2 * size if is_third else size)
    max_len = min(layer.max_model_len, model.config.max_model_len)
    rotations = Rotations(layer.ropes, max_len, model.device, is_lazy=True)
    head = _take_head(config, checkpoint) if is_third else LayerHead(_model_head(model, dtype))
    return DraftLayerWeights(Embedding(embedding, dtype), inputs, taken, head, eps, rotations)


def _take_projection(checkpoint: Checkpoint, names: list[str], rows: list[int], columns: int) -> Projection:
    weight = checkpoint.take_rows([f"{name}.weight" for name in names], [(count, columns) for count in rows])
    bias = None
    if checkpoint.has(f"{names[0]}.bias"):
        bias = checkpoint.take_rows([f"{name}.bias" for name in names], [(count,) for count in rows])
    return Projection(DenseWeight(weight), bias)


def _take_decoder_layer(
    config: ModelConfig, checkpoint: Checkpoint, prefix: str, attention_norm: NormWeights | None, num_inputs: int
) -> LayerWeights:
    size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    heads = [count * dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    mixer = AttentionWeights(
        shape=config.attention_shape(0),
        qkv=_take_projection(checkpoint, [f"{attention}.{part}_proj" for part in "qkv"], heads, num_inputs),
        output=_take_projection(checkpoint, [f"{attention}.o_proj"], [size], heads[0]),
    )
    feed_forward = GatedWeights(
        gate_up=_take_projection(checkpoint, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], size),
        down=_take_projection(checkpoint, [f"{mlp}.down_proj"], [size], inner),
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
    matrix, norm = _take_projection(checkpoint, ["lm_head"], [count], size), checkpoint.take("norm.weight", size)
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
