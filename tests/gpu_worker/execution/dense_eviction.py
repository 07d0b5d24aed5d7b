"""A Llama that keeps some of its tokens, token by token in plain torch: the oracle of evictions.

It keeps keys as they are before any rotation, and rotates all of them anew for every token, to their places among those
that are kept.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu_worker.core.kept_tokens import kept_tokens


class DenseLlama:
    """Computes with the weights of a model of transformers."""

    def __init__(self, model: Any) -> None:
        self._model, self._config = model, model.config
        self._head_dim = model.config.hidden_size // model.config.num_attention_heads

    @torch.no_grad()
    def logits(self, token_ids: list[int], *budget: int) -> torch.Tensor:
        """Return the logits behind each token; the budget is as `kept_tokens` takes it."""
        layers = self._model.model.layers
        keys: list[list[torch.Tensor]] = [[] for _ in layers]
        values: list[list[torch.Tensor]] = [[] for _ in layers]
        rows = []
        for place, token_id in enumerate(token_ids):
            kept = kept_tokens(place, *budget)
            x = self._model.model.embed_tokens.weight[token_id]
            for layer, own_keys, own_values in zip(layers, keys, values, strict=True):
                x = x + self._attend(layer, layer.input_layernorm(x), own_keys, own_values, kept)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            rows.append(self._model.lm_head(self._model.model.norm(x)))
        return torch.stack(rows)

    def _attend(
        self, layer: Any, x: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], kept: list[int]
    ) -> torch.Tensor:
        attention, dim = layer.self_attn, self._head_dim
        keys.append(attention.k_proj(x).view(-1, dim))
        values.append(attention.v_proj(x).view(-1, dim))
        places = torch.arange(len(kept))
        key = self._rotated(torch.stack([keys[token] for token in kept]), places)
        query = self._rotated(attention.q_proj(x).view(1, -1, dim), places[-1:])[0]
        value = torch.stack([values[token] for token in kept])
        growth = len(query) // key.shape[1]
        scores = torch.einsum("hd,thd->ht", query, key.repeat_interleave(growth, 1)) * dim**-0.5
        attended = torch.einsum("ht,thd->hd", scores.softmax(-1), value.repeat_interleave(growth, 1))
        output: torch.Tensor = attention.o_proj(attended.flatten())
        return output

    def _rotated(self, heads: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        parameters = self._config.rope_parameters
        exponents = torch.arange(0, self._head_dim, 2).float() / self._head_dim
        angles = places.float()[:, None, None] * parameters["rope_theta"] ** -exponents
        first, second = heads.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
