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
from pathlib import Path

import torch

from gpu_worker.layers.attention import Attention
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.gated_mlp import GatedMLP
from gpu_worker.layers.linear import Linear, make_linear
from gpu_worker.layers.rms_norm import RMSNorm
from gpu_worker.layers.rotary_embedding import rotary_table
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.draft_weights import open_draft_weights
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.llama import read_config

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
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.dtype = dtype
        self.device = model.device
        head = size * config.vocab_size
        own = 2 * size**2 + _num_weights(config) + head
        whole = model.config.num_layers * _num_weights(model.config) + head
        self.relative_cost = own * dtype.itemsize / (whole * model.dtype.itemsize)
        self._model = model
        self._head = model.head_in(dtype)
        self._embedding = None
        if checkpoint.has("embed_tokens.weight"):
            self._embedding = checkpoint.take("embed_tokens.weight", config.vocab_size, size)
        self._join = _take_linear(checkpoint, ["fc"], [size], 2 * size)
        norm = f"{_LAYER}.input_layernorm.weight"
        self._attention_norm = RMSNorm(checkpoint.take(norm, size), eps) if checkpoint.has(norm) else None
        self._attention = _take_attention(config, checkpoint)
        self._mlp_norm = RMSNorm(checkpoint.take(f"{_LAYER}.post_attention_layernorm.weight", size), eps)
        inner, mlp = config.intermediate_size, f"{_LAYER}.mlp"
        gate_up = _take_linear(checkpoint, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], size)
        self._mlp = GatedMLP(gate_up, _take_linear(checkpoint, [f"{mlp}.down_proj"], [size], inner))
        self._cos_sin = rotary_table(config.rope, config.head_dim, config.max_model_len, model.device)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Write entries into the cache, and return what they yield.

        Shapes:
            token_ids: `[num_tokens]` int64, the token behind each hidden vector
            hidden: `[num_tokens, hidden_size]`, normalised as for the model's head, or what this returned
            positions: `[num_tokens]` int64, of the hidden vectors
            result: `[num_tokens, hidden_size]`, in the layer's type
        """
        embedded = self._model.embed(token_ids) if self._embedding is None else self._embedding[token_ids]
        residual = self._join(torch.cat((embedded.to(self.dtype), hidden.to(self.dtype)), dim=1))
        x = residual if self._attention_norm is None else self._attention_norm(residual)
        x = self._attention(x, positions, self._cos_sin, context)
        return residual.add_(self._mlp(self._mlp_norm.add(x, residual)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary for rows of what `forward()` returned, `[num_rows, vocab_size]` float32."""
        return self._head(hidden)


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


def _take_linear(checkpoint: Checkpoint, names: list[str], rows: list[int], columns: int) -> Linear:
    """Take layers of the same input as one; they have biases where the checkpoint says so."""
    weight = checkpoint.take_rows([f"{name}.weight" for name in names], [(count, columns) for count in rows])
    if not checkpoint.has(f"{names[0]}.bias"):
        return make_linear(weight)
    return make_linear(weight, checkpoint.take_rows([f"{name}.bias" for name in names], [(count,) for count in rows]))


def _take_attention(config: ModelConfig, checkpoint: Checkpoint) -> Attention:
    name, dim = f"{_LAYER}.self_attn", config.head_dim
    rows = [count * dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    qkv = _take_linear(checkpoint, [f"{name}.{part}_proj" for part in "qkv"], rows, config.hidden_size)
    output = _take_linear(checkpoint, [f"{name}.o_proj"], [config.hidden_size], rows[0])
    return Attention(0, config.attention_shape(0), qkv, output)
