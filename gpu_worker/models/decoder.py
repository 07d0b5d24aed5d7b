"""The decoder that all families share: a stack of attention and gated feed-forward blocks over one residual stream."""

from __future__ import annotations

import torch

from gpu_worker.layers.attention import Attention
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.gated_mlp import GatedMLP
from gpu_worker.layers.linear import Linear, make_linear
from gpu_worker.layers.rms_norm import HeadNorm, RMSNorm
from gpu_worker.layers.rotary_embedding import RotaryEmbedding
from gpu_worker.layers.vocabulary import Embedding, LMHead
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig


class DecoderLayer:
    """Attention and feed-forward block of one layer, each with its normalisation before it."""

    __slots__ = ("_attention", "_attention_norm", "_mlp", "_mlp_norm")

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, index: int) -> None:
        """Take the layer's weights."""
        name = f"model.layers.{index}"
        size, eps = config.hidden_size, config.rms_norm_eps
        self._attention_norm = RMSNorm(checkpoint.take(f"{name}.input_layernorm.weight", size), eps)
        self._attention = _attention(config, checkpoint, index)
        self._mlp_norm = RMSNorm(checkpoint.take(f"{name}.post_attention_layernorm.weight", size), eps)
        self._mlp = _mlp(config, checkpoint, f"{name}.mlp")

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
        context: AttentionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's last contribution, not added yet, and the residual stream before it.

        Args:
            x: The previous layer's contribution, or the embeddings.
            residual: The stream to add it to, in place; None at the first layer, where `x` becomes the stream.
            rotation: cos and signed sin of the step's tokens.
            context: The step's batch.

        Shapes:
            x, residual, both results: `[num_tokens, hidden_size]`
        """
        if residual is None:
            residual = x
            x = self._attention_norm(x)
        else:
            x = self._attention_norm.add(x, residual)
        x = self._attention(x, *rotation, context)
        return self._mlp(self._mlp_norm.add(x, residual)), residual


class CausalLM:
    """A whole model on one device. Holds weights only: every call's state is in its arguments."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        """Take every weight that the configuration calls for; the rest stays in the checkpoint."""
        self.config = config
        self.dtype = dtype
        self.device = device
        vocabulary = checkpoint.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._embedding = Embedding(vocabulary)
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_model_len, dtype, device)
        self._layers = [DecoderLayer(config, checkpoint, index) for index in range(config.num_layers)]
        self._norm = RMSNorm(checkpoint.take("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        if config.tie_word_embeddings:
            checkpoint.discard(r"lm_head\.weight")
        else:
            vocabulary = checkpoint.take("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = LMHead(make_linear(vocabulary))

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Compute a step: write the tokens' keys and values into the cache, return their hidden vectors.

        Call it, and `logits()`, under `torch.inference_mode()`.

        Shapes:
            token_ids, positions: `[num_tokens]` int64, the sequences end to end; positions below `max_model_len`
            result: `[num_tokens, hidden_size]`, normalised for `logits()`
        """
        x, residual = self._embedding(token_ids), None
        rotation = self._rotary(positions)
        for layer in self._layers:
            x, residual = layer(x, residual, rotation, context)
        return self._norm(x) if residual is None else self._norm.add(x, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary.

        Shapes:
            hidden: `[num_rows, hidden_size]`, rows of what `forward()` returned
            result: `[num_rows, vocab_size]` float32
        """
        return self._head(hidden)


def _attention(config: ModelConfig, checkpoint: Checkpoint, index: int) -> Attention:
    name = f"model.layers.{index}.self_attn"
    rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    parts = [f"{name}.{part}_proj" for part in "qkv"]
    qkv = _linear(checkpoint, parts, rows, config.hidden_size, config.qkv_bias)
    output = _linear(checkpoint, [f"{name}.o_proj"], [config.hidden_size], rows[0], config.output_bias)
    head_norm = None
    if config.qk_norm:
        query = checkpoint.take(f"{name}.q_norm.weight", config.head_dim).expand(config.num_heads, -1)
        key = checkpoint.take(f"{name}.k_norm.weight", config.head_dim).expand(config.num_kv_heads, -1)
        head_norm = HeadNorm(torch.cat((query, key)), config.rms_norm_eps)
    return Attention(index, config.attention_shape(index), qkv, output, head_norm)


def _mlp(config: ModelConfig, checkpoint: Checkpoint, name: str) -> GatedMLP:
    size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    gate_up = _linear(checkpoint, [f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], size, bias)
    return GatedMLP(gate_up, _linear(checkpoint, [f"{name}.down_proj"], [size], inner, bias))


def _linear(checkpoint: Checkpoint, names: list[str], rows: list[int], columns: int, bias: bool) -> Linear:
    """Build one linear layer of several projections of the same input, their features one after another."""
    weight = checkpoint.take_rows([f"{name}.weight" for name in names], [(count, columns) for count in rows])
    offset = checkpoint.take_rows([f"{name}.bias" for name in names], [(count,) for count in rows]) if bias else None
    return make_linear(weight, offset)
