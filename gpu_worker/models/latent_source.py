"""Takes the weights of attention by latent vectors from a checkpoint."""

from __future__ import annotations

import torch

from gpu_worker.layers.layer_traits import LatentShape
from gpu_worker.layers.layer_weights import LatentWeights, Projection
from gpu_worker.models.projections import Projections
from gpu_worker.models.weight_source import WeightSource

# Of the normalisations within attention, whatever that of the layers is.
_EPS = 1e-6


def take_latent(
    checkpoint: WeightSource, projections: Projections, prefix: str, shape: LatentShape, hidden_size: int
) -> LatentWeights:
    """Take the attention of the layer `prefix`, and divide what makes keys and values of a latent vector by heads."""
    name, rank = f"{prefix}.self_attn", shape.query_rank
    query_rows = [shape.num_heads * (shape.plain_dim + shape.rotary_dim)]
    query_down: Projection | None = None
    query_norm = None
    if rank is None:
        query = projections.take([f"{name}.q_proj"], query_rows, hidden_size)
    else:
        query_down = projections.take([f"{name}.q_a_proj"], [rank], hidden_size, has_bias=shape.has_bias)
        query_norm = checkpoint.take(f"{name}.q_a_layernorm.weight", rank)
        query = projections.take([f"{name}.q_b_proj"], query_rows, rank)
    latent_names = [f"{name}.kv_a_proj_with_mqa"]
    latent = projections.take(latent_names, [shape.key_dim], hidden_size, has_bias=shape.has_bias)
    norm = checkpoint.take(f"{name}.kv_a_layernorm.weight", shape.latent_dim)
    keys_up, values_up = _take_up(checkpoint, projections, name, shape, norm.dtype)
    return LatentWeights(
        shape,
        query_down,
        query_norm,
        query,
        latent,
        norm,
        _EPS,
        keys_up,
        values_up,
        projections.take([f"{name}.o_proj"], [hidden_size], shape.num_heads * shape.value_dim, has_bias=shape.has_bias),
    )


def _take_up(
    checkpoint: WeightSource, projections: Projections, name: str, shape: LatentShape, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take what makes keys of a latent vector, `[num_heads, plain_dim, latent_dim]`, and what values are made by.

    The second is `[num_heads, latent_dim, value_dim]`. GGUF has the two apart, by heads, that of the keys transposed.
    """
    keys, values = f"{name}.k_b_proj.weight", f"{name}.v_b_proj.weight"
    if checkpoint.has(keys):
        keys_up = checkpoint.take(keys, shape.num_heads, shape.latent_dim, shape.plain_dim).to(dtype)
        values_up = checkpoint.take(values, shape.num_heads, shape.value_dim, shape.latent_dim).to(dtype)
        return keys_up.transpose(1, 2).contiguous(), values_up.transpose(1, 2).contiguous()
    up_rows = shape.plain_dim + shape.value_dim
    up = projections.take([f"{name}.kv_b_proj"], [shape.num_heads * up_rows], shape.latent_dim).weight
    heads = up.dequantize().to(dtype).view(shape.num_heads, up_rows, shape.latent_dim)
    return heads[:, : shape.plain_dim].contiguous(), heads[:, shape.plain_dim :].transpose(1, 2).contiguous()
