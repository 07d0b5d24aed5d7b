"""What layers keep of a sequence, counted by hand from the sizes of each kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.attention_beside_mamba2 import AttentionBesideMamba2Shape
from gpu_worker.layers.cache_layout import (
    CacheLayout,
    KeepsBoth,
    KeepsState,
    KeepsTokens,
    LayerMemory,
    ReadsLayer,
    StatePart,
)
from gpu_worker.layers.gated_delta_net import GatedDeltaShape
from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.layers.layer import LayerTraits, MixerShape
from gpu_worker.layers.mamba2 import Mamba2Shape
from gpu_worker.layers.short_conv import ShortConvShape
from kernels.gated_delta import DeltaSizes
from kernels.layer_cache import CacheShape
from kernels.ssd import SsdSizes
from tests.gpu_worker.models.support_page import sample_config

ATTENTION = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=32)
TOKENS = CacheShape(num_kv_heads=2, key_dim=32, value_dim=32)
# 4 heads of 16, two groups with a vector of 8 each for what goes in and what comes out: 4 * 16 + 2 * 2 * 8 features.
MAMBA2 = Mamba2Shape(SsdSizes(num_heads=4, head_dim=16, num_groups=2, state_size=8), conv_width=4)
MAMBA2_STATE = KeepsState((StatePart((3, 96), torch.float32), StatePart((4, 8, 16), torch.float32)), num_inputs=96 + 4)
# 2 heads of queries and of keys, 8 numbers each, and 4 of values of 16: 2 * 2 * 8 + 4 * 16 features, 2 gates a head.
DELTA = GatedDeltaShape(DeltaSizes(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=16), conv_width=3)
DELTA_STATE = KeepsState(
    (StatePart((2, 96), torch.float32), StatePart((4, 8, 16), torch.float32)), num_inputs=96 + 2 * 4
)
LATENT = LatentShape(
    num_heads=8, query_rank=None, latent_dim=64, plain_dim=32, rotary_dim=16, value_dim=32, scale=48**-0.5
)


def layout_of(*mixers: MixerShape | None) -> CacheLayout:
    config = sample_config("LlamaForCausalLM")
    layers = tuple(LayerTraits(mixer, config.layer(0).feed_forward) for mixer in mixers)
    return replace(config, layers=layers, num_layers=len(layers)).cache_layout


@pytest.mark.parametrize(
    ("mixer", "memory"),
    [
        (None, None),
        (ATTENTION, KeepsTokens(TOKENS)),
        (replace(ATTENTION, sliding_window=9), KeepsTokens(TOKENS, 9)),
        (replace(ATTENTION, chunk_size=7), KeepsTokens(TOKENS, 7)),
        (replace(ATTENTION, sliding_window=9, chunk_size=7), KeepsTokens(TOKENS, 7)),
        (LATENT, KeepsTokens(CacheShape(num_kv_heads=1, key_dim=64 + 16, value_dim=64, is_latent=True))),
        (ShortConvShape(24, conv_width=3), KeepsState((StatePart((2, 24), torch.float32),), num_inputs=24)),
        (MAMBA2, MAMBA2_STATE),
        (DELTA, DELTA_STATE),
        (
            AttentionBesideMamba2Shape(replace(ATTENTION, sliding_window=9), MAMBA2),
            KeepsBoth(KeepsTokens(TOKENS, 9), MAMBA2_STATE),
        ),
    ],
    ids=["nothing", "all", "window", "chunk", "smaller", "latent", "conv", "mamba2", "delta", "both"],
)
def test_layer_keeps_what_its_mixer_reads_again(mixer: MixerShape | None, memory: LayerMemory) -> None:
    assert layout_of(mixer).layers == (memory,)


def test_layer_that_reads_an_earlier_one_keeps_nothing_of_its_own() -> None:
    layout = layout_of(ATTENTION, DELTA, replace(ATTENTION, reads_layer=0))
    assert layout.layers == (KeepsTokens(TOKENS), DELTA_STATE, ReadsLayer(0))
    assert layout.groups[0].layers == (0,)


def test_model_that_attends_in_both_directions_keeps_nothing() -> None:
    config = sample_config("BertModel")
    assert config.cache_layout.layers == (None,) * config.num_layers
