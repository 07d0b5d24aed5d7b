"""Attention over entries of which the latest are the draft's own: what an EAGLE layer sees while it drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_worker.layers.rotary_embedding import rotary_table
from gpu_worker.models.config import ModelConfig
from ops.demo_model.architecture import rotated


@dataclass(slots=True)
class DraftEntries:
    """Keys and values of each step so far, of all entries. Only `EagleAttention` writes here.

    Attributes:
        cos, sin: `[num_entries, head_dim / 2]`
        keys, values: A step each, `[num_rows, num_heads, num_entries, head_dim]`.
    """

    cos: Tensor
    sin: Tensor
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class EagleAttention(nn.Module):
    """Causal grouped-query attention; in step `s` an entry sees step `m`'s version of the entry `s - m` before it."""

    def __init__(self, target: ModelConfig) -> None:
        """Create the four projections, of the target's sizes."""
        super().__init__()
        self._config = target
        size, dim = target.hidden_size, target.head_dim
        self.q_proj = nn.Linear(size, target.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(size, target.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(size, target.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(target.num_heads * dim, size, bias=False)

    def begin(self, num_entries: int) -> DraftEntries:
        """Return a cache without entries, for rows of this length."""
        assert self._config.rope is not None, "a target without attention is refused before"
        table = rotary_table(self._config.rope, self._config.head_dim, num_entries, torch.device("cpu"))
        cos, sin = table.chunk(2, -1)
        return DraftEntries(cos, sin)

    def forward(self, x: Tensor, cache: DraftEntries) -> Tensor:
        """Attend over the entries' next version, and add it to the cache.

        Shapes:
            x: `[num_rows, num_entries, hidden_size]`; so is the result
        """
        dim, groups = self._config.head_dim, self._config.num_heads // self._config.num_kv_heads
        q, k, v = (
            projection(x).unflatten(-1, (-1, dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotated(heads, cache.cos, cache.sin) for heads in (q, k))
        cache.keys.append(k.repeat_interleave(groups, 1))
        cache.values.append(v.repeat_interleave(groups, 1))
        out = _attend(q, cache.keys, cache.values)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    step = len(keys) - 1
    if step == 0:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    num_entries = q.shape[2]
    scale = q.shape[-1] ** -0.5
    seen = torch.ones(num_entries, num_entries, dtype=torch.bool).tril(-step)
    scores = [(q @ keys[0].transpose(-1, -2)).masked_fill(~seen, float("-inf"))]
    own = [(_later(keys[made], step - made), _later(values[made], step - made)) for made in range(1, step + 1)]
    scores += [(q * k).sum(-1, keepdim=True) for k, _ in own]
    shares = torch.softmax(torch.cat(scores, -1).float() * scale, -1).to(q.dtype)
    out = shares[..., :num_entries] @ values[0]
    for number, (_, v) in enumerate(own):
        out = out + shares[..., num_entries + number, None] * v
    return out


def _later(x: Tensor, distance: int) -> Tensor:
    """Move each entry back by `distance` places, where the entry that sees it is."""
    return F.pad(x, (0, 0, distance, 0))[:, :, : x.shape[2]] if distance else x
