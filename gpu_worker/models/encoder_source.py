"""Takes the weights of an encoder from a checkpoint, by the names that BERT gave them."""

from __future__ import annotations

import torch

from gpu_worker.layers.encoder import Encoder, EncoderEmbeddings, EncoderLayer, EncoderLayerWeights
from gpu_worker.layers.layer_source import Projections, WeightSource
from gpu_worker.layers.norms import LayerNorm
from gpu_worker.models.config import EncoderTraits, ModelConfig
from kernels.linear import LinearFactory

WORDS = "embeddings.word_embeddings.weight"
# Of other uses of the checkpoint, or numbers that are computed here.
UNUSED = r"pooler\..*|cls\..*|lm_head\..*|embeddings\.(position_ids|token_type_ids)"


def take_encoder(
    config: ModelConfig, traits: EncoderTraits, source: WeightSource, words: torch.Tensor, linears: LinearFactory
) -> Encoder:
    """Take embeddings and layers; `words` are those of `WORDS`."""
    size, projections = config.hidden_size, Projections(source)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(source.take(f"{name}.weight", size), source.take(f"{name}.bias", size), config.rms_norm_eps)

    def layer(index: int) -> EncoderLayer:
        name = f"encoder.layer.{index}"
        attention = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        weights = EncoderLayerWeights(
            qkv=projections.take(attention, [size] * 3, size, has_bias=True),
            output=projections.take([f"{name}.attention.output.dense"], [size], size, has_bias=True),
            attention_norm=norm(f"{name}.attention.output.LayerNorm"),
            inner=projections.take([f"{name}.intermediate.dense"], [config.intermediate_size], size, has_bias=True),
            outer=projections.take([f"{name}.output.dense"], [size], config.intermediate_size, has_bias=True),
            norm=norm(f"{name}.output.LayerNorm"),
        )
        return EncoderLayer(weights, config.num_heads, traits.activation, linears)

    embeddings = EncoderEmbeddings(
        words,
        source.take("embeddings.position_embeddings.weight", traits.num_positions, size),
        source.take("embeddings.token_type_embeddings.weight", traits.num_segments, size),
        norm("embeddings.LayerNorm"),
        traits.first_position,
        traits.separator,
    )
    return Encoder(embeddings, (layer(index) for index in range(config.num_layers)))
