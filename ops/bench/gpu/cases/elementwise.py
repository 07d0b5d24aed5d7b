"""RMS normalisation with the residual, and SiLU times the gate: bound by memory where there are many rows."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from kernels.activation import Activation, gated
from kernels.rms_norm import rms_norm
from kernels.rope_kv_write import HeadNormWeights, rope_kv_write
from kernels.rope_kv_write.reference import rope_kv_write_reference
from ops.bench.gpu.case import OURS, Candidate, Case, Entry, Op, compiled, relative_error, rotated, sizes
from ops.bench.gpu.cases.attention_batch import BLOCK_SIZE
from ops.bench.gpu.shapes import DENSE_MODELS, LLAMA3_8B, QWEN3_06B, QWEN3_32B, ModelShape

EPS = 1e-5
_MANY_ROWS = 8192


def normalise(
    weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, entry: Entry | None = None
) -> torch.Tensor:
    """Run our op; on a GPU launched by an entry where one is given, like the other ops here."""
    if entry is None or x.device.type != "cuda":
        return rms_norm(x, weight, EPS, residual)
    from kernels.rms_norm.triton_kernel import RmsNormConfig, rms_norm_triton

    return rms_norm_triton(x, weight, EPS, residual, RmsNormConfig(**entry))


def multiply_by_silu(gate_up: torch.Tensor, entry: Entry | None = None) -> torch.Tensor:
    """Run our op."""
    if entry is None or gate_up.device.type != "cuda":
        return gated(gate_up, Activation.SILU)
    from kernels.activation.triton_kernel import SiluMulConfig, gated_triton

    return gated_triton(gate_up, Activation.SILU, SiluMulConfig(**entry))


def rms_norm_error(device: torch.device, num_rows: int, size: int, entry: Entry | None = None) -> float:
    """Compare with the formula in float64, and the residual with the exact sum rounded once."""
    x, residual = torch.randn(2, num_rows, size, device=device).bfloat16()
    weight = torch.randn(size, device=device).bfloat16()
    total = (x.double() + residual.double()).bfloat16()
    scale = (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    expected = total.double() * scale * weight.double()
    actual = normalise(weight, x, residual, entry)
    return max(relative_error(actual, expected), relative_error(residual, total))


def rms_norm_case(device: torch.device, num_rows: int, size: int) -> Case:
    """Read input and residual, write residual and output."""
    num_bytes = 4 * num_rows * size * 2
    weight = torch.randn(size, device=device).bfloat16()

    def in_torch(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(residual.add_(x), weight.shape, weight, EPS)

    def make() -> torch.Tensor:
        return torch.randn(2, num_rows, size, device=device).bfloat16()

    calls: dict[str, Candidate] = {OURS: partial(normalise, weight), "_fused_rms_norm": in_torch}
    calls["torch.compile"] = compiled(in_torch)
    return Case(num_bytes, 0, *rotated(num_bytes, make, calls))


def silu_mul_error(device: torch.device, num_rows: int, size: int, entry: Entry | None = None) -> float:
    """Compare with the formula in float64."""
    gate_up = torch.randn(num_rows, 2 * size, device=device).bfloat16()
    gate, up = gate_up.double().chunk(2, dim=-1)
    return relative_error(multiply_by_silu(gate_up, entry), F.silu(gate) * up)


def silu_mul_case(device: torch.device, num_rows: int, size: int) -> Case:
    """Read both halves, write one."""
    num_bytes = 3 * num_rows * size * 2

    def make() -> tuple[torch.Tensor]:
        return (torch.randn(num_rows, 2 * size, device=device, dtype=torch.bfloat16),)

    def in_torch(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    calls = {OURS: multiply_by_silu, "torch.compile": compiled(in_torch), "eager": in_torch}
    return Case(num_bytes, 0, *rotated(num_bytes, make, calls))


RMS_NORM_OP = Op(rms_norm_error, rms_norm_case)
SILU_MUL_OP = Op(silu_mul_error, silu_mul_case)
RMS_NORM = RMS_NORM_OP.suite(
    "rms_norm",
    sizes((1, 4096), (7, 1023), (65, 5120), (3, 16_385), prefix="bf16 "),
    {
        f"{model.name} {rows}x{model.hidden_size}": (rows, model.hidden_size)
        for model, rows in [(LLAMA3_8B, 1), (LLAMA3_8B, 64), *((model, _MANY_ROWS) for model in DENSE_MODELS)]
    },
)
SILU_MUL = SILU_MUL_OP.suite(
    "silu_mul",
    sizes((1, 14_336), (7, 1023), (65, 3072), prefix="bf16 "),
    {
        f"{model.name} {rows}x{model.intermediate_size}": (rows, model.intermediate_size)
        for model, rows in [(LLAMA3_8B, 1), (LLAMA3_8B, 64), (LLAMA3_8B, _MANY_ROWS), (QWEN3_32B, _MANY_ROWS)]
    },
)


_MAX_POSITIONS = 8192


class RotationInputs:
    """Tokens at random positions, each with a slot of its own."""

    def __init__(self, device: torch.device, model: ModelShape, num_tokens: int) -> None:
        heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
        self.qkv = torch.randn(num_tokens, heads + 2 * kv_heads, dim, device=device).bfloat16()
        self.positions = torch.randint(0, _MAX_POSITIONS, (num_tokens,), device=device)
        angles = torch.randn(_MAX_POSITIONS, dim // 2, device=device)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
        shape = (2, num_blocks, BLOCK_SIZE, kv_heads, dim)
        self.key_cache, self.value_cache = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        self.slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
        weights = torch.rand(2, dim, device=device).bfloat16() + 0.5
        self.head_norm = (
            HeadNormWeights(weights[0], weights[1], 1e-6) if model.fields["model_type"] == "qwen3" else None
        )

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
    calls = {OURS: RotationInputs.rotate, "torch.compile": compiled(_rotated_in_torch)}
    return Case(num_bytes, 0, *rotated(num_bytes, lambda: (RotationInputs(device, model, num_tokens),), calls))


def _rotated_in_torch(inputs: RotationInputs) -> torch.Tensor:
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
