"""Rotation of queries and keys, with qk-norm where the model has it, and the write of keys and values."""

from __future__ import annotations

import torch

from kernels.rope_kv_write import HeadNormWeights, rope_kv_write
from kernels.rope_kv_write.reference import rope_kv_write_reference
from ops.bench.gpu.case import OURS, Case, Entry, Op, compiled, relative_error, sets_for
from ops.bench.gpu.shapes import LLAMA3_8B, QWEN3_06B, QWEN3_32B, ModelShape

_BLOCK_SIZE = 16
_MAX_POSITIONS = 8192


class RotationInputs:
    """Tokens at random positions, each with a slot of its own."""

    def __init__(self, device: torch.device, model: ModelShape, num_tokens: int) -> None:
        heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
        self.qkv = torch.randn(num_tokens, heads + 2 * kv_heads, dim, device=device).bfloat16()
        self.positions = torch.randint(0, _MAX_POSITIONS, (num_tokens,), device=device)
        angles = torch.randn(_MAX_POSITIONS, dim // 2, device=device)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        num_blocks = -(-num_tokens // _BLOCK_SIZE) + 1
        shape = (2, num_blocks, _BLOCK_SIZE, kv_heads, dim)
        self.key_cache, self.value_cache = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        self.slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=device)[:num_tokens]
        weights = torch.rand(2, dim, device=device).bfloat16() + 0.5
        self.head_norm = HeadNormWeights(weights[0], weights[1], 1e-6) if model.has_qk_norm else None

    def rotate(self, entry: Entry | None = None) -> torch.Tensor:
        """Run our op; on a GPU launched by an entry where one is given."""
        arguments = (
            self.qkv, self.positions, self.cos_sin, self.key_cache, self.value_cache, self.slots, self.head_norm
        )  # fmt: skip
        if entry is None or self.qkv.device.type != "cuda":
            return rope_kv_write(*arguments)
        from kernels.rope_kv_write.triton_kernel import RopeConfig, rope_kv_write_triton

        return rope_kv_write_triton(*arguments, config=RopeConfig(**entry))


def rotation_error(device: torch.device, model: ModelShape, num_tokens: int, entry: Entry | None = None) -> float:
    """Compare queries and caches with the reference in float32 on the same rounded inputs."""
    inputs = RotationInputs(device, model, num_tokens)
    qkv = inputs.qkv.float()
    keys, values = torch.zeros(2, *inputs.key_cache.shape, device=device)
    norm = inputs.head_norm and HeadNormWeights(
        inputs.head_norm.query.float(), inputs.head_norm.key.float(), inputs.head_norm.eps
    )
    expected = rope_kv_write_reference(qkv, inputs.positions, inputs.cos_sin, keys, values, inputs.slots, norm)
    errors = [relative_error(inputs.rotate(entry), expected)]
    errors += [relative_error(inputs.key_cache, keys), relative_error(inputs.value_cache, values)]
    return max(errors)


def rotation_case(device: torch.device, model: ModelShape, num_tokens: int) -> Case:
    """Read queries, keys and values, and write them; the table of a position is shared and small."""
    heads = model.num_heads + 2 * model.num_kv_heads
    num_bytes = 2 * num_tokens * heads * model.head_dim * 2
    num_sets = sets_for(num_bytes)
    sets = [RotationInputs(device, model, num_tokens) for _ in range(num_sets)]
    fused = compiled(_in_torch)
    return Case(
        num_bytes,
        0,
        num_sets,
        {
            OURS: lambda index, entry=None: sets[index].rotate(entry),
            "torch.compile": lambda index: fused(sets[index]),
        },
    )


def _in_torch(inputs: RotationInputs) -> torch.Tensor:
    """The same in operations that torch.compile fuses: no padding, so nothing depends on the values of the slots."""
    heads, kv_heads = inputs.qkv.shape[1], inputs.key_cache.shape[2]
    num_heads = heads - 2 * kv_heads
    rotated, value = inputs.qkv[:, : num_heads + kv_heads].float(), inputs.qkv[:, num_heads + kv_heads :]
    if inputs.head_norm:
        norm = inputs.head_norm
        weight = torch.cat((norm.query.expand(num_heads, -1), norm.key.expand(kv_heads, -1))).float()
        rotated = rotated * (rotated.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weight
    cos, sin = inputs.cos_sin[inputs.positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16()
    inputs.key_cache.flatten(0, 1).index_copy_(0, inputs.slots, rotated[:, num_heads:])
    inputs.value_cache.flatten(0, 1).index_copy_(0, inputs.slots, value)
    return inputs.qkv[:, :num_heads].copy_(rotated[:, :num_heads])


ROPE_KV_WRITE_OP = Op(rotation_error, rotation_case)
ROPE_KV_WRITE = ROPE_KV_WRITE_OP.suite(
    "rope_kv_write",
    {f"{model.name} {tokens} tokens": (model, tokens) for model in (LLAMA3_8B, QWEN3_06B) for tokens in (1, 77)},
    {
        f"{model.name} {tokens} tokens": (model, tokens)
        for model, tokens in ((LLAMA3_8B, 64), (LLAMA3_8B, 8192), (QWEN3_06B, 8192), (QWEN3_32B, 8192))
    },
)
