"""The layer of EAGLE: from a token and the hidden vector before it, it foretells the token's own hidden vector.

Entry `i` of its KV cache is made from hidden vector `i` and token `i + 1`, at position `i`; what it yields stands for
hidden vector `i + 1`, and the model's own head reads token `i + 2` from it.

Read from the layout of EAGLE and EAGLE-2: `fc.weight`, `layers.0.…` without `input_layernorm`, and
`embed_tokens.weight` where it is not the model's.

Source: Li et al., "EAGLE" (arXiv 2401.15077), section 4.1; the first layer has no normalisation before its attention,
as in the authors' code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.eagle_form import EagleForm, EagleStep, EagleWeights, Place
from gpu_worker.layers.fused_decoder import fusing_library
from gpu_worker.layers.fused_eagle import FusedEagle
from gpu_worker.layers.layer_weights import LayerWeights, Projection
from gpu_worker.layers.layered_eagle import LayeredEagle
from gpu_worker.layers.rotary_embedding import rotary_table
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.draft_weights import open_draft_weights
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.llama import read_config
from gpu_worker.quantization.weight_forms import DenseWeight
from kernels.decoder_stack import StackShape

_LAYER = "layers.0"
_EAGLE3 = ("d2t", "t2d", "midlayer.self_attn.q_proj.weight", "norm.weight")
_REMEDY = "take weights that were trained for this model"


class EagleLayer:
    """The layer that was trained for one model. Holds weights only.

    Attributes:
        config: Its sizes; one layer.
        dtype: What it computes in.
        device: Where it runs.
        relative_cost: What a pass takes, with the scores, as a share of a step of the model: by their weights, which is
            what takes the time.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, model: CausalLM, dtype: torch.dtype) -> None:
        """Take every weight that the configuration calls for.

        Args:
            config: Sizes and options.
            checkpoint: Holds the weights.
            model: Gives device, vocabulary head, and the embedding where the checkpoint has none.
            dtype: What to compute in.
        """
        size = config.hidden_size
        self.config = config
        self.dtype = dtype
        self.device = model.device
        head = size * config.vocab_size
        own = 2 * size**2 + _num_weights(config) + head
        whole = model.config.num_layers * _num_weights(model.config) + head
        self.relative_cost = own * dtype.itemsize / (whole * model.dtype.itemsize)
        self._form = _form(config, _take_weights(config, checkpoint, model, dtype), model)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Write entries into the cache, and return what they yield; the arguments are those of `EagleStep`."""
        return self._form(EagleStep(token_ids, hidden, positions, context))

    def foretell(
        self, step: EagleStep, limits: Sequence[int], num_candidates: int, least_score: float
    ) -> list[list[Place]]:
        """Do what `EagleForm` promises."""
        return self._form.foretell(step, limits, num_candidates, least_score)


def load_eagle_layer(directory: Path, model: CausalLM, dtype: torch.dtype | None = None) -> EagleLayer:
    """Load the layer that was trained for `model`, to compute in `dtype`, or else in the model's type.

    Raises:
        CheckpointError: A file, field or tensor is missing, malformed, of another model's size, or of EAGLE-3.
    """
    file = JsonFile.read(directory / "config.json")
    dtype = dtype or model.dtype
    with open_draft_weights(directory, dtype, model.device) as checkpoint:
        for name in _EAGLE3:
            if checkpoint.has(name):
                problem = "belongs to EAGLE-3, which is not supported; take EAGLE or EAGLE-2 weights"
                raise checkpoint.error(name, problem)
        config = _read_config(file, model.config)
        layer = EagleLayer(config, checkpoint, model, dtype)
        checkpoint.discard(r"lm_head\.weight|layers\.0\.self_attn\.rotary_emb\.inv_freq")
        checkpoint.check_all_taken()
    return layer


def _read_config(file: JsonFile, model: ModelConfig) -> ModelConfig:
    """Read the layer's configuration; it serves sequences as long as the model's."""
    config = read_config(file)
    for field, found, needed in (
        ("num_hidden_layers", config.num_layers, 1),
        ("hidden_size", config.hidden_size, model.hidden_size),
        ("vocab_size", config.vocab_size, model.vocab_size),
    ):
        if found != needed:
            raise file.error(field, f"is {found}, but must be {needed}; {_REMEDY}")
    return dataclasses.replace(config, max_model_len=model.max_model_len)


def _num_weights(config: ModelConfig) -> int:
    """Return how many numbers the matrices of a layer hold."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.hidden_size * (heads + 3 * config.intermediate_size)


def _form(config: ModelConfig, weights: EagleWeights, model: CausalLM) -> EagleForm:
    """Choose the form: fused into one call where that can be had, else operation by operation."""
    shape = StackShape(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rms_norm_eps,
    )
    dtype = weights.embedding.dtype
    library = fusing_library(shape, dtype, model.device)
    if library is not None and model.config.tie_word_embeddings:
        return FusedEagle(library, shape, weights, Projection(DenseWeight(model.embedding.to(dtype))))
    head = model.head_in(dtype)
    matrix = head.packed_for(dtype)
    if library is None or matrix is None:
        return LayeredEagle(weights, head)
    return FusedEagle(library, shape, weights, matrix)


def _take_weights(config: ModelConfig, checkpoint: Checkpoint, model: CausalLM, dtype: torch.dtype) -> EagleWeights:
    size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    if checkpoint.has("embed_tokens.weight"):
        embedding = checkpoint.take("embed_tokens.weight", config.vocab_size, size)
    else:
        embedding = model.embedding.to(dtype)
    norm, attention, mlp = f"{_LAYER}.input_layernorm.weight", f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
    heads = [count * dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    layer = LayerWeights(
        shape=config.attention_shape(0),
        attention_norm=checkpoint.take(norm, size) if checkpoint.has(norm) else None,
        qkv=_take_projection(checkpoint, [f"{attention}.{part}_proj" for part in "qkv"], heads, size),
        head_norm=None,
        output=_take_projection(checkpoint, [f"{attention}.o_proj"], [size], heads[0]),
        mlp_norm=checkpoint.take(f"{_LAYER}.post_attention_layernorm.weight", size),
        gate_up=_take_projection(checkpoint, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], size),
        down=_take_projection(checkpoint, [f"{mlp}.down_proj"], [size], inner),
    )
    join = _take_projection(checkpoint, ["fc"], [size], 2 * size)
    cos_sin = rotary_table(config.rope, dim, config.max_model_len, model.device)
    return EagleWeights(embedding, join, layer, config.rms_norm_eps, cos_sin)


def _take_projection(checkpoint: Checkpoint, names: list[str], rows: list[int], columns: int) -> Projection:
    """Take layers of the same input as one; they have biases where the checkpoint says so."""
    weight = checkpoint.take_rows([f"{name}.weight" for name in names], [(count, columns) for count in rows])
    bias = None
    if checkpoint.has(f"{names[0]}.bias"):
        bias = checkpoint.take_rows([f"{name}.bias" for name in names], [(count,) for count in rows])
    return Projection(DenseWeight(weight), bias)
