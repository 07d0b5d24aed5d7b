from __future__ import annotations

import pytest
import torch

from gpu_worker.layers.cache_layout import (
    CacheLayout,
    KeepsBoth,
    KeepsState,
    KeepsTokens,
    LayerMemory,
    ReadsLayer,
    StatePart,
    TokenGroup,
)
from kernels.layer_cache import CacheShape

SHAPE = CacheShape(2, 64, 64)
FULL, NEAR, FAR = KeepsTokens(SHAPE), KeepsTokens(SHAPE, 128), KeepsTokens(SHAPE, 512)
STATE = KeepsState((StatePart((4, 8, 8), torch.float32), StatePart((96, 3), torch.bfloat16)))


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        pytest.param((FULL, FULL), [(None, (0, 1))], id="full"),
        pytest.param((NEAR, FULL, NEAR), [(None, (1,)), (128, (0, 2))], id="sliding-and-full"),
        pytest.param((NEAR, NEAR), [(None, ()), (128, (0, 1))], id="only-sliding"),
        pytest.param((FAR, NEAR, FULL), [(None, (2,)), (128, (1,)), (512, (0,))], id="two-windows"),
        pytest.param((STATE, STATE, FULL), [(None, (2,))], id="hybrid"),
        pytest.param((KeepsBoth(NEAR, STATE), FULL), [(None, (1,)), (128, (0,))], id="both"),
        pytest.param((None, None), [(None, ())], id="encoder"),
    ],
)
def test_layers_that_need_the_same_tokens_are_a_group(
    layers: tuple[LayerMemory, ...], groups: list[tuple[int | None, tuple[int, ...]]]
) -> None:
    assert CacheLayout(layers).groups == tuple(TokenGroup(*group) for group in groups)


def test_layer_that_reads_another_has_its_group_and_no_memory() -> None:
    layout = CacheLayout((FULL, NEAR, ReadsLayer(0), ReadsLayer(1), STATE, None))
    assert [group.layers for group in layout.groups] == [(0,), (1,)]
    assert layout.group_of_layer == (0, 1, 0, 1, None, None)


def test_layer_cannot_read_one_that_comes_later_or_keeps_no_tokens() -> None:
    with pytest.raises(AssertionError):
        CacheLayout((ReadsLayer(1), FULL))
    with pytest.raises(AssertionError):
        CacheLayout((STATE, ReadsLayer(0)))


def test_state_takes_the_bytes_of_its_parts() -> None:
    layout = CacheLayout((STATE, FULL, STATE))
    assert layout.state_layers == (0, 2)
    assert layout.state_bytes == 2 * (4 * 8 * 8 * 4 + 96 * 3 * 2)
    assert CacheLayout((FULL,)).state_bytes == 0


def test_layer_may_keep_tokens_and_a_state() -> None:
    layout = CacheLayout((KeepsBoth(NEAR, STATE), FULL, STATE, ReadsLayer(0)))
    assert layout.state_layers == (0, 2)
    assert layout.state_bytes == CacheLayout((STATE, STATE)).state_bytes
    assert layout.shape_of(0) == SHAPE
    assert layout.flat().layers[0] == layout.within(128).layers[0] == KeepsBoth(FULL, STATE)
    assert layout.within(129).layers[0] == KeepsBoth(NEAR, STATE)


def test_flat_layout_keeps_all_tokens_of_all_layers() -> None:
    layout = CacheLayout((FAR, ReadsLayer(0), STATE, FULL)).flat()
    assert [group.layers for group in layout.groups] == [(0, 3)]
    assert layout.group_of_layer == (0, 0, None, 0)
