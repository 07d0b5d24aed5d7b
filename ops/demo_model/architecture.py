"""The network: a Llama in plain torch, with the parameter names that every loader of Llama checkpoints expects.

Only training and evaluation use it. Serving reads the exported files with the project's own model code, and the tests
compare both with `transformers`.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of the network, under the names that `config.json` uses."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LlamaShape":
        """Return the sizes that a `config.json` of ours states."""
        return cls(**{field.name: config[field.name] for field in fields(cls)})

    def to_config(self) -> dict[str, Any]:
        """Return the `config.json` that makes other software build this network."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "initializer_range": 0.02,
            "torch_dtype": "float16",
            "use_cache": True,
        }


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        """Create the four projections."""
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over `x: [batch, length, hidden_size]`; `cos` and `sin` are `[length, head_dim / 2]`."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.shape.head_dim)
        q = rotated(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = rotated(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class FeedForward(nn.Module):
    """The gated feed-forward layer (SwiGLU)."""

    def __init__(self, size: int, inner_size: int) -> None:
        """Create the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(size, inner_size, bias=False)
        self.up_proj = nn.Linear(size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x: [..., size]`."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each normalised first and added back."""

    def __init__(self, shape: LlamaShape) -> None:
        """Create the two halves and their norms."""
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer to `x: [batch, length, hidden_size]`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The whole network; its output head is its embedding table."""

    def __init__(self, shape: LlamaShape) -> None:
        """Create the parameters; the projections that write to the residual stream start small."""
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * shape.num_hidden_layers) ** -0.5 if is_output else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits `[batch, length, vocab_size]` for `ids: [batch, length]`."""
        return F.linear(self.hidden(ids), self.embed_tokens.weight)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return what the head is given, `[batch, length, hidden_size]`, for `ids: [batch, length]`."""
        cos, sin = _rotary_tables(ids.shape[1], self.shape)
        x: Tensor = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        normalised: Tensor = self.norm(x)
        return normalised


def _rotary_tables(length: int, shape: LlamaShape) -> tuple[Tensor, Tensor]:
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `x: [..., length, head_dim]`, halves of which are pairs, by `[length, head_dim / 2]` angles."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
