"""Quantizes and packs single layers as the public formats define it, value by value, with none of the engine's code.

Every packer returns the tensors a checkpoint would hold, and the dense matrix that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP8_MAX = 448.0
BLOCK = 128

Inputs = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class PackedLayer:
    """Tensors by the end of their name, the dense matrix they stand for, and what becomes of the layer's inputs."""

    tensors: dict[str, torch.Tensor]
    dense: torch.Tensor
    inputs: Inputs | None = None


@dataclass
class Groups:
    """Integers with a scale and a zero point for each row and group."""

    q: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    dense: torch.Tensor


def group_quantize(weight: torch.Tensor, bits: int, group_of: np.ndarray, *, symmetric: bool, low: int = 0) -> Groups:
    """Quantize to `low ... low + 2**bits - 1`; column j belongs to group `group_of[j]`."""
    w = weight.double().numpy()
    high = low + 2**bits - 1
    num_groups = int(group_of.max()) + 1
    scales = np.zeros((len(w), num_groups))
    zeros = np.zeros((len(w), num_groups), np.int64)
    q = np.zeros(w.shape, np.int64)
    for group in range(num_groups):
        columns = group_of == group
        part = w[:, columns]
        if symmetric:
            scale = 2 * np.abs(part).max(axis=1) / (2**bits - 1)
            zero = np.full(len(w), low + 2 ** (bits - 1))
        else:
            least, most = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scale = (most - least) / (2**bits - 1)
            # Never the lowest value: GPTQ's first layout cannot store a zero point of zero.
            zero = np.clip(low - np.round(least / scale), low + 1, high).astype(np.int64)
        scale = scale.astype(np.float16).astype(np.float64)
        scales[:, group], zeros[:, group] = scale, zero
        q[:, columns] = np.clip(np.round(part / scale[:, None]) + zero[:, None], low, high)
    dense = (q - zeros[:, group_of]) * scales[:, group_of]
    return Groups(q, scales, zeros, torch.from_numpy(dense).float())


def words(values: np.ndarray, bits: int) -> torch.Tensor:
    """Put neighbouring columns into 32-bit words, the first into the lowest bits."""
    per_word = 32 // bits
    packed = np.zeros((len(values), -(-values.shape[1] // per_word)), np.uint32)
    for column in range(values.shape[1]):
        packed[:, column // per_word] |= values[:, column].astype(np.uint32) << (bits * (column % per_word))
    return torch.from_numpy(packed.view(np.int32).copy())


def in_order(columns: int, group_size: int) -> np.ndarray:
    return np.arange(columns) // (columns if group_size == -1 else group_size)


def shuffled(columns: int, group_size: int, seed: int) -> np.ndarray:
    """Groups of columns that were quantized in another order, as act-order does."""
    order = np.random.default_rng(seed).permutation(columns)
    group_of = np.empty(columns, np.int64)
    group_of[order] = in_order(columns, group_size)
    return group_of


def gptq(
    weight: torch.Tensor, bits: int, group_of: np.ndarray, *, symmetric: bool = True, version: int = 1
) -> PackedLayer:
    groups = group_quantize(weight, bits, group_of, symmetric=symmetric)
    stored_zeros = groups.zeros - 1 if version == 1 else groups.zeros
    tensors = {
        "qweight": words(groups.q, bits).T.contiguous(),
        "qzeros": words(stored_zeros.T, bits),
        "scales": torch.from_numpy(groups.scales).T.half().contiguous(),
        "g_idx": torch.from_numpy(group_of).int(),
    }
    return PackedLayer(tensors, groups.dense)


def awq(weight: torch.Tensor, group_size: int) -> PackedLayer:
    groups = group_quantize(weight, 4, in_order(weight.shape[1], group_size), symmetric=False)

    def interleaved(values: np.ndarray) -> torch.Tensor:
        packed = np.zeros((len(values), values.shape[1] // 8), np.uint32)
        for word in range(packed.shape[1]):
            for nibble, output in enumerate(AWQ_ORDER):
                packed[:, word] |= values[:, 8 * word + output].astype(np.uint32) << (4 * nibble)
        return torch.from_numpy(packed.view(np.int32).copy())

    tensors = {
        "qweight": interleaved(groups.q.T),
        "qzeros": interleaved(groups.zeros.T),
        "scales": torch.from_numpy(groups.scales).T.half().contiguous(),
    }
    return PackedLayer(tensors, groups.dense)


def ct_packed(
    weight: torch.Tensor, bits: int, group_of: np.ndarray, *, symmetric: bool, has_order: bool = False
) -> PackedLayer:
    low = -(2 ** (bits - 1))
    groups = group_quantize(weight, bits, group_of, symmetric=symmetric, low=low)
    tensors = {
        "weight_packed": words(groups.q - low, bits),
        "weight_scale": torch.from_numpy(groups.scales).half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words((groups.zeros - low).T, bits).T.contiguous()
    if has_order:
        tensors["weight_g_idx"] = torch.from_numpy(group_of).int()
    return PackedLayer(tensors, groups.dense)


def int8(weight: torch.Tensor, *, per_channel: bool = True, inputs: Inputs | None = None) -> PackedLayer:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127 if per_channel else weight.abs().max().view(1) / 127
    q = (weight / scale).round().clamp(-128, 127)
    return PackedLayer({"weight": q.to(torch.int8), "weight_scale": scale}, q * scale, inputs)


def fp8(
    weight: torch.Tensor, scale: torch.Tensor, inputs: Inputs | None = None, name: str = "weight_scale"
) -> PackedLayer:
    """With a scale that broadcasts over the weight."""
    q = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return PackedLayer({"weight": q, name: scale}, q.float() * scale, inputs)


def fp8_blocks(weight: torch.Tensor, inputs: Inputs | None = None, name: str = "weight_scale_inv") -> PackedLayer:
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    q, dense = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = (slice(BLOCK * i, BLOCK * (i + 1)), slice(BLOCK * j, BLOCK * (j + 1)))
            scales[i, j] = weight[here].abs().max() / FP8_MAX
            q[here] = (weight[here] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[here] = q[here].float() * scales[i, j]
    return PackedLayer({"weight": q, name: scales}, dense, inputs)


def int8_inputs(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True) / 127 if scale is None else scale
    return (x / scale).round().clamp(-128, 127) * scale


def fp8_inputs(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True) / FP8_MAX if scale is None else scale
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


def fp8_block_inputs(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([fp8_inputs(part) for part in x.split(BLOCK, dim=-1)], dim=-1)
