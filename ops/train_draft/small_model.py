"""A smaller Llama with the target's vocabulary, trained to say what the target would say.

Its embedding, which is its head too, begins as the best approximation of the target's of its own width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu_worker.models.config import ModelConfig
from ops.demo_model.architecture import Llama, LlamaShape
from ops.train_draft.distillation import kl_divergences
from ops.train_draft.rows import Batch
from ops.train_draft.target import Vocabulary

_HEAD_DIM = 64


def small_shape(target: ModelConfig, hidden_size: int | None, num_layers: int | None) -> LlamaShape:
    """Return the sizes of the draft; what is not given is about a quarter of the target's width and an eighth deep."""
    multiple = min(_HEAD_DIM, target.head_dim)
    width = hidden_size or max(multiple, round(target.hidden_size / 4 / multiple) * multiple)
    return LlamaShape(
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 32) * 32,
        num_hidden_layers=num_layers or max(1, round(target.num_layers / 8)),
        num_attention_heads=max(1, width // multiple),
        num_key_value_heads=1,
        head_dim=multiple,
        max_position_embeddings=target.max_model_len,
        rms_norm_eps=target.rms_norm_eps,
    )


class SmallModelStudent:
    """The smaller model."""

    first_distance = 1

    def __init__(self, target: ModelConfig, vocabulary: Vocabulary, shape: LlamaShape) -> None:
        """Create the network."""
        self._target = target
        self._vocabulary = vocabulary
        self.module = Llama(shape)
        with torch.no_grad():
            self.module.embed_tokens.weight.copy_(_narrowed(vocabulary.embedding, shape.hidden_size))

    def loss(self, batch: Batch) -> Tensor:
        """Return the divergence from the target."""
        ours, theirs = self._hidden(batch.token_ids).flatten(0, 1), batch.hidden.flatten(0, 1)
        return kl_divergences([ours], [self.module.embed_tokens.weight], theirs, self._vocabulary.head)[0]

    def draft_tokens(self, batch: Batch, count: int) -> Tensor:
        """Return the likeliest next token of each place, and behind it those of the places after."""
        chosen = F.linear(self._hidden(batch.token_ids), self.module.embed_tokens.weight).argmax(-1)
        return torch.stack([chosen.roll(-step, 1) for step in range(count)], -1)

    def config(self) -> dict[str, Any]:
        """Return the fields by which other software builds the network; it ends where the target does."""
        ends = sorted(self._target.eos_token_ids)
        special = {"bos_token_id": self._target.bos_token_id, "eos_token_id": ends or None, "pad_token_id": None}
        return self.module.shape.to_config() | special

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the weights under the names of Llama's checkpoints."""
        return {f"model.{name}": tensor for name, tensor in self.module.state_dict().items()}

    def _hidden(self, token_ids: Tensor) -> Tensor:
        hidden: Tensor = self.module.hidden(token_ids)
        return hidden.float()


def _narrowed(embedding: Tensor, size: int) -> Tensor:
    """Return the vectors' coordinates along the directions in which they differ most, of the same mean length."""
    if size >= embedding.shape[1]:
        return F.pad(embedding, (0, size - embedding.shape[1]))
    _, directions = torch.linalg.eigh(embedding.T @ embedding)
    narrow = embedding @ directions[:, -size:]
    scaled: Tensor = narrow * (embedding.norm() / narrow.norm())
    return scaled
