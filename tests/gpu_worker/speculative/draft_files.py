"""Writes random EAGLE layers in the public layouts, and computes them plainly."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def save_draft(directory: Path, config: dict[str, object], tensors: Tensors, file: str = "model.safetensors") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / file)


EAGLE_SIZES = {
    "num_hidden_layers": 1,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def eagle_config(size: int, vocab: int, /, **fields: object) -> dict[str, object]:
    architectures = ["LlamaForCausalLM"]
    return {**EAGLE_SIZES, "architectures": architectures, "hidden_size": size, "vocab_size": vocab, **fields}


def eagle_tensors(size: int, *, has_fc_bias: bool = True, vocab_size: int | None = None) -> Tensors:
    """Make a layer; with `vocab_size` it has an embedding of its own."""
    dim, inner = size // 4, 40
    rows = {"q": size, "k": 2 * dim, "v": 2 * dim}
    tensors = {f"layers.0.self_attn.{part}_proj.weight": torch.randn(n, size) / size**0.5 for part, n in rows.items()}
    tensors["layers.0.self_attn.o_proj.weight"] = torch.randn(size, size) / size**0.5
    tensors["layers.0.mlp.gate_proj.weight"] = torch.randn(inner, size) / size**0.5
    tensors["layers.0.mlp.up_proj.weight"] = torch.randn(inner, size) / size**0.5
    tensors["layers.0.mlp.down_proj.weight"] = torch.randn(size, inner) / inner**0.5
    tensors["layers.0.post_attention_layernorm.weight"] = torch.rand(size) + 0.5
    tensors["fc.weight"] = torch.randn(size, 2 * size) / size**0.5
    if has_fc_bias:
        tensors["fc.bias"] = torch.randn(size) * 0.3
    if vocab_size is not None:
        tensors["embed_tokens.weight"] = torch.randn(vocab_size, size) * 0.3
    return tensors


def eagle_outputs(tensors: Tensors, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Compute all entries of a sequence at once: dense attention, as the authors' code does it.

    Shapes:
        embedded: `[num_entries, size]`, of the token behind each hidden vector
        hidden: `[num_entries, size]`
    """
    x = torch.cat((embedded, hidden), dim=1) @ tensors["fc.weight"].T
    x = x + tensors.get("fc.bias", torch.zeros(hidden.shape[1]))
    return _layer_outputs(tensors, "layers.0", x, x)


def _layer_outputs(tensors: Tensors, prefix: str, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """Add to the stream what attention makes of `x`, then what the feed-forward block adds."""
    count, size = stream.shape
    dim = size // 4
    name = f"{prefix}.self_attn"
    query, key, value = (
        (x @ tensors[f"{name}.{part}_proj.weight"].T).view(count, -1, dim).transpose(0, 1) for part in "qkv"
    )
    query, key = _rotated(query), _rotated(key).repeat_interleave(2, dim=0)
    scores = query @ key.transpose(1, 2) / dim**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
    attended = (scores.softmax(-1) @ value.repeat_interleave(2, dim=0)).transpose(0, 1).reshape(count, size)
    stream = stream + attended @ tensors[f"{name}.o_proj.weight"].T
    normed = _normed(stream, tensors[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = (normed @ tensors[f"{prefix}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return stream + (F.silu(gate) * up) @ tensors[f"{prefix}.mlp.down_proj.weight"].T


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    dim = heads.shape[-1]
    angles = torch.arange(heads.shape[1])[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def eagle3_config(size: int, vocab: int, num_features: int, /, **fields: object) -> dict[str, object]:
    layer = eagle_config(size, vocab, architectures=["LlamaForCausalLMEagle3"])
    return {**layer, "draft_vocab_size": num_features, **fields}


def eagle3_tensors(
    size: int, vocab: int, num_features: int, *, num_tapped: int = 3, prefix: str = "midlayer"
) -> Tensors:
    """Make a layer in the layout of the paper's authors, or with another prefix, of the `speculators` library."""
    old = eagle_tensors(size, has_fc_bias=False)
    tensors = {name.replace("layers.0", prefix): tensor for name, tensor in old.items()}
    for part in "qkv":
        name = f"{prefix}.self_attn.{part}_proj.weight"
        tensors[name] = torch.randn(len(tensors[name]), 2 * size) / (2 * size) ** 0.5
    for name in (f"{prefix}.input_layernorm", f"{prefix}.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = torch.rand(size) + 0.5
    tensors["fc.weight"] = torch.randn(size, num_tapped * size) / (num_tapped * size) ** 0.5
    tensors["lm_head.weight"] = torch.randn(num_features, size) * 0.5
    chosen = torch.randperm(vocab)[:num_features].sort().values
    tensors["d2t"] = chosen - torch.arange(num_features)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def eagle3_outputs(
    tensors: Tensors, embedded: torch.Tensor, hidden: torch.Tensor, *, is_stream_normed: bool = False
) -> torch.Tensor:
    """Compute all entries of a sequence at once, as the paper's Figure 5 has it: the stream behind the layer.

    Shapes:
        embedded: `[num_entries, size]`, of the token behind each hidden vector
        hidden: `[num_entries, size]`, what `fc` makes of the model's layers, or what this returned
    """
    prefix = "midlayer" if "midlayer.mlp.up_proj.weight" in tensors else "layers.0"
    normed = _normed(hidden, tensors[f"{prefix}.hidden_norm.weight"])
    x = torch.cat((_normed(embedded, tensors[f"{prefix}.input_layernorm.weight"]), normed), dim=1)
    return _layer_outputs(tensors, prefix, x, normed if is_stream_normed else hidden)


def eagle3_scores(tensors: Tensors, output: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the log probabilities of all tokens, `-inf` for those that have no feature."""
    scores = (_normed(output, tensors["norm.weight"]) @ tensors["lm_head.weight"].T).log_softmax(-1)
    token_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return torch.full((vocab,), -torch.inf).index_copy(0, token_ids, scores)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
