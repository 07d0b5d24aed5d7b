"""The least that a step of a model must read and compute, from its weights' sizes and what its layers keep.

Bytes: every weight once but for the table of embeddings, of which rows are looked up where it is not the head too; of
experts those that a token of the step has; keys and values of what each sequence sees; states read and written.
Operations: each token's weights, the head for rows that are sampled, attention over the pairs of tokens that see one
another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.layer import MixerShape
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.models.config import ModelConfig
from ops.bench.gpu.step.random_model import WeightSize

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.")
_VECTOR = re.compile(r".*(norm\.weight|bias|A_log|sinks)$")
# Of a number in the cache.
_CACHE_BYTES = 2

Lengths = Sequence[tuple[int, int]]
"""Of each sequence the tokens that the step computes, and its tokens after the step."""


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Bytes that move through the device's memory at least, and operations on tensor cores."""

    num_bytes: int
    num_flops: int


def step_floor(
    config: ModelConfig, sizes: Mapping[str, WeightSize], lengths: Lengths, experts_read: Sequence[float] = ()
) -> StepFloor:
    """Return the floor of one step, which samples behind the last token of each sequence.

    Takes the sizes of all weights by name, and of each layer with experts how many the step's tokens have read. The
    floor of no sequences is the reading of the weights.
    """
    num_tokens = sum(query for query, _ in lengths)
    head = _EMBEDDING if config.tie_word_embeddings else _HEAD
    num_bytes = _bytes_kept(config, lengths)
    flops = float(sum(_flops_of(layer.mixer, lengths) for layer in config.layers))
    layers = enumerate(config.layers)
    mixtures = [index for index, layer in layers if isinstance(layer.feed_forward, MixtureShape)]
    shares = dict(zip(mixtures, experts_read, strict=True))
    for name, size in sizes.items():
        expert = _EXPERT.match(name)
        if expert is not None:
            layer = int(expert[1])
            mixture = config.layer(layer).feed_forward
            assert isinstance(mixture, MixtureShape)
            share, num_rows = shares[layer] / mixture.num_experts, num_tokens * mixture.rule.top_k / mixture.num_experts
        else:
            is_looked_up = name == _EMBEDDING != head
            share, num_rows = 0.0 if is_looked_up else 1.0, len(lengths) if name == head else num_tokens
        num_bytes += size.num_bytes * share
        if share and not _VECTOR.match(name):
            flops += 2 * num_rows * size.numbers
    return StepFloor(round(num_bytes), round(flops))


def _bytes_kept(config: ModelConfig, lengths: Lengths) -> float:
    layout = config.cache_layout
    total = 2 * len(lengths) * layout.state_bytes
    for tokens in filter(None, map(layout.tokens_of, range(config.num_layers))):
        seen = sum(min(context, tokens.window or context) for _, context in lengths)
        shape = tokens.shape
        numbers = shape.num_kv_heads * (shape.key_dim + (0 if shape.is_latent else shape.value_dim))
        total += seen * numbers * _CACHE_BYTES
    return float(total)


def _flops_of(mixer: MixerShape | None, lengths: Lengths) -> int:
    """Return the operations of one layer between its projections.

    Latent attention is counted with heads of keys and values of their own: computed on latent vectors it takes more.
    """
    if isinstance(mixer, AttentionShape):
        return 4 * _num_pairs(lengths, mixer.sliding_window) * mixer.num_heads * mixer.head_dim
    if isinstance(mixer, LatentShape):
        numbers = mixer.plain_dim + mixer.rotary_dim + mixer.value_dim
        return 2 * _num_pairs(lengths, None) * mixer.num_heads * numbers
    assert isinstance(mixer, GatedDeltaShape), f"no floor is known of {type(mixer).__name__}"
    sizes = mixer.sizes
    # The state times a key, the correction's outer product, and the state times a query.
    return 6 * sum(query for query, _ in lengths) * sizes.num_value_heads * sizes.key_dim * sizes.value_dim


def _num_pairs(lengths: Lengths, window: int | None) -> int:
    positions = (position for query, context in lengths for position in range(context - query, context))
    return sum(position + 1 if window is None else min(position + 1, window) for position in positions)
