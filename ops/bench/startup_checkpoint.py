"""Writes checkpoints of any size, shard by shard, to measure how fast they load; the numbers are of no interest."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from ops.bench.make_model import SHAPES, Shape, Size, configuration, weight_shapes

SHARD_BYTES = 4 << 30

SHAPES_BY_NAME = {
    "15m": SHAPES[Size.M15],
    "160m": SHAPES[Size.M160],
    "8b": Shape(128_256, 4096, 14_336, 32, 32, 8, is_tied=False, max_len=8192),
}

_DRAWN = 1 << 22


def write_checkpoint(shape: Shape, directory: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Write configuration and bfloat16 weights, in shards of at most `shard_bytes`; return the weights' bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(configuration(shape)))
    shards = _shards(weight_shapes(shape), shard_bytes)
    normal = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        is_single = len(shards) == 1
        file = "model.safetensors" if is_single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: _values(size, normal) for name, size in names.items()}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(2 * math.prod(size) for names in shards for size in names.values())


def _shards(shapes: dict[str, tuple[int, ...]], shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    left = shard_bytes
    for name, size in shapes.items():
        num_bytes = 2 * math.prod(size)
        if num_bytes > left and shards[-1]:
            shards.append({})
            left = shard_bytes
        shards[-1][name] = size
        left -= num_bytes
    return shards


def _values(size: tuple[int, ...], normal: torch.Tensor) -> torch.Tensor:
    """Repeat the drawn numbers: drawing billions takes minutes."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    count = math.prod(size)
    repeated = normal.repeat(-(-count // len(normal)))[:count].view(size)
    return repeated.mul_(1 / math.sqrt(size[1]))
