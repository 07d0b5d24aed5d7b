"""Linear layers on plain and quantized weights, beside cuBLAS in bfloat16 and torch's own quantized products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.gpu_config import gpu_of
from kernels.linear.forms import INT4, INT8, SCALE_BLOCK, GroupQuantizedWeight, Number, QuantizedWeight, ScaledWeight
from kernels.linear.gpu_packed import PackedMatrix, pack_for_gpu, packed_linear
from kernels.linear.gpu_scaled import ScaledMatrix, scale_for_gpu, scale_matrix, scaled_linear
from kernels.linear.gpu_scaled.block_product import multiply_blocks
from kernels.linear.product_launch import ProductLaunch
from kernels.linear.reference import form_linear_reference, quantize_tokens, round_inputs
from ops.bench.gpu.case import OURS, Candidate, Case, Entry, Op, relative_error, rotated, sets_for, sizes
from ops.bench.gpu.shapes import DENSE_MODELS, LLAMA3_8B

_GROUP_SIZE = 128
_ROWS = (1, 16, 64, 2048)
_MANY_ROWS = 64
_INNER_K_TILES = 8
Candidates = dict[str, Candidate]
MakeWeight = Callable[[torch.device, int, int], QuantizedWeight]
# Each is made from the inputs and the plain weights; None is one that cannot run on the device.
Baselines = Mapping[str, Callable[[torch.Tensor, Sequence[Any]], Candidate | None]]
Matrix = PackedMatrix | ScaledMatrix | QuantizedWeight


def on_device(form: QuantizedWeight) -> Matrix:
    """Return the matrix as its device multiplies it; where that has no kernel, as it is."""
    return scale_for_gpu(form) or pack_for_gpu(form) or form


def multiply(x: torch.Tensor, matrix: Matrix, entry: Entry | None = None, max_rows: int = 0) -> torch.Tensor:
    """Multiply rows by what `on_device` returned; an entry is of the launches for up to `max_rows` rows."""
    if isinstance(matrix, PackedMatrix):
        return packed_linear(x, matrix) if entry is None else _launch_packed(x, matrix, entry, max_rows)
    if isinstance(matrix, ScaledMatrix):
        return scaled_linear(x, matrix) if entry is None else _launch_scaled(x, matrix, entry, max_rows)
    return form_linear_reference(x, matrix)


def _launch_packed(x: torch.Tensor, matrix: PackedMatrix, entry: Entry, max_rows: int) -> torch.Tensor:
    from kernels.linear.gpu_packed.triton_product import packed_linear_triton

    launch = ProductLaunch(block_m=max_rows, **entry)
    return packed_linear_triton(x, matrix, None, x.dtype, gpu_of(x.device), launch)


def _launch_scaled(x: torch.Tensor, matrix: ScaledMatrix, entry: Entry, max_rows: int) -> torch.Tensor:
    from kernels.linear.gpu_scaled.triton_product import scaled_linear_triton
    from kernels.linear.rounding.triton_kernel import quantize_tokens_triton

    rows, launch = quantize_tokens_triton(x, matrix.rounding), ProductLaunch(block_m=max_rows, **entry)
    return scaled_linear_triton(rows.values, rows.scales, matrix, None, x.dtype, gpu_of(x.device), launch)


def int4_weight(device: torch.device, out_features: int, in_features: int) -> GroupQuantizedWeight:
    """Make a matrix of 4-bit integers."""
    values = torch.randint(256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(out_features, -(-in_features // _GROUP_SIZE), device=device) + 0.1
    return GroupQuantizedWeight(values, INT4, _GROUP_SIZE, scales, -8 * scales)


def grouped_weight(
    device: torch.device, out_features: int, in_features: int, number: Number, group_size: int, num_codes: int
) -> GroupQuantizedWeight:
    """Make a matrix of codes around the middle of `num_codes`, as those of GGUF are, with scales of float32."""
    per_byte = 8 // number.bits
    codes = torch.randint(num_codes, (out_features, in_features // per_byte, per_byte), device=device)
    shifts = number.bits * torch.arange(per_byte, device=device)
    values = (codes << shifts).sum(dim=2).to(torch.uint8)
    scales = torch.rand(out_features, -(-in_features // group_size), device=device) + 0.1
    centres = num_codes / 2 + (torch.rand_like(scales) - 0.5 if number is INT4 else 0.0)
    return GroupQuantizedWeight(values, number, group_size, scales, -centres * scales)


def int8_weight(device: torch.device, out_features: int, in_features: int) -> ScaledWeight:
    """Make a matrix of 8-bit integers, with a scale for each row."""
    values = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8, device=device)
    return ScaledWeight(values, torch.rand(out_features, 1, device=device) + 0.1, "dynamic")


def fp8_weight(device: torch.device, out_features: int, in_features: int, has_blocks: bool = False) -> ScaledWeight:
    """Make a matrix of float8, with a scale for each row or for each block."""
    values = torch.randn(out_features, in_features, device=device).mul_(50).to(torch.float8_e4m3fn)
    blocks = (-(-out_features // SCALE_BLOCK), -(-in_features // SCALE_BLOCK)) if has_blocks else (out_features, 1)
    return ScaledWeight(values, torch.rand(blocks, device=device) + 0.1, "dynamic")


def random_inputs(device: torch.device, num_rows: int, in_features: int) -> torch.Tensor:
    """Make rows."""
    return torch.randn(num_rows, in_features, device=device, dtype=torch.bfloat16)


def linear_error(
    device: torch.device,
    num_rows: int,
    out_features: int,
    in_features: int,
    make_weight: MakeWeight,
    entry: Entry | None = None,
    max_rows: int = 0,
) -> float:
    """Compare with float64, inputs rounded as in the reference where the form rounds them."""
    weight, x = make_weight(device, out_features, in_features), random_inputs(device, num_rows, in_features)
    inputs = round_inputs(x, weight) if isinstance(weight, ScaledWeight) else x
    exact = inputs.double() @ weight.dequantize().double().T
    return relative_error(multiply(x, on_device(weight), entry, max_rows), exact)


def linear_case(
    device: torch.device,
    num_rows: int,
    out_features: int,
    in_features: int,
    make_weight: MakeWeight,
    baselines: Baselines,
) -> Case:
    """Read the weight and its scales once; inputs are quantized as part of ours, and beforehand for baselines."""
    x = random_inputs(device, num_rows, in_features)
    first = make_weight(device, out_features, in_features)
    weight_bytes = first.values.nbytes + (first.scales.nbytes if isinstance(first, GroupQuantizedWeight) else 0)
    num_sets = sets_for(weight_bytes)
    plain = [first, *(make_weight(device, out_features, in_features) for _ in range(num_sets - 1))]
    weights = [on_device(weight) for weight in plain]
    candidates: Candidates = {OURS: lambda index, entry=None: multiply(x, weights[index], entry, num_rows)}
    unavailable = {}
    candidates |= _both_ways(x, weights) | _product_alone(x, weights)
    for name, make in baselines.items():
        try:
            made = make(x, plain)
        except (ImportError, AttributeError) as error:
            unavailable[name] = str(error)
        else:
            candidates |= {} if made is None else {name: made}
    # The dense layer has sets of its own: one of its weights is as large as several quantized ones.
    num_dense = sets_for(2 * out_features * in_features)
    dense = torch.randn(num_dense, out_features, in_features, device=device, dtype=x.dtype)
    candidates["cuBLAS bf16"] = lambda index: F.linear(x, dense[index % num_dense])
    # Products of 8 bits are done at twice the rate of those in bfloat16, which the ceiling was measured with.
    rate = 2 if isinstance(first, ScaledWeight) else 1
    num_flops = 2 * num_rows * out_features * in_features // rate
    num_bytes = weight_bytes + 2 * num_rows * (in_features + out_features)
    return Case(num_bytes, num_flops, num_sets, candidates, unavailable)


def _torch_int8(x: torch.Tensor, plain: Sequence[Any]) -> Candidate:
    values, _ = quantize_tokens(x)
    return lambda index: torch._int_mm(values, plain[index].values.t())


def _torch_fp8(x: torch.Tensor, plain: Sequence[Any]) -> Candidate:
    values, scales = x.to(torch.float8_e4m3fn), torch.ones(len(x), 1, device=x.device)
    rows = [weight.scales.t().contiguous() for weight in plain]
    return lambda index: torch._scaled_mm(
        values, plain[index].values.t(), scale_a=scales, scale_b=rows[index], out_dtype=torch.bfloat16
    )


def _torch_blocks(x: torch.Tensor, plain: Sequence[Any]) -> Candidate | None:
    if x.device.type != "cuda":
        return None
    from kernels.linear.rounding.triton_kernel import quantize_tokens_triton

    matrices = [scale_matrix(weight) for weight in plain]
    rows = quantize_tokens_triton(x, matrices[0].rounding)
    return lambda index: multiply_blocks(rows.values, rows.scales, matrices[index].values, matrices[index].scales)


def _both_ways(x: torch.Tensor, weights: Sequence[object]) -> Candidates:
    """Of many rows, weights unpacked by the product and written out before it: the launch table decides which."""
    packed = [weight for weight in weights if isinstance(weight, PackedMatrix)]
    if not packed or len(x) < _MANY_ROWS:
        return {}
    from kernels.linear.gpu_packed.triton_dequantize import dequantize_triton
    from kernels.linear.gpu_packed.triton_product import packed_linear_triton

    gpu = gpu_of(x.device)
    return {
        f"{OURS}/fused": lambda index: packed_linear_triton(x, packed[index], None, x.dtype, gpu),
        f"{OURS}/written": lambda index: F.linear(x, dequantize_triton(packed[index], x.dtype)),
    }


def _product_alone(x: torch.Tensor, weights: Sequence[object]) -> Candidates:
    scaled = [weight for weight in weights if isinstance(weight, ScaledMatrix) and not weight.has_blocks]
    if not scaled:
        return {}
    from kernels.linear.gpu_scaled.triton_product import scaled_linear_triton
    from kernels.linear.rounding.triton_kernel import quantize_tokens_triton

    gpu = gpu_of(x.device)
    rows = quantize_tokens_triton(x, scaled[0].rounding)
    return {
        f"{OURS}/product": lambda index: scaled_linear_triton(
            rows.values, rows.scales, scaled[index], None, x.dtype, gpu
        )
    }


def _torch_int4(x: torch.Tensor, plain: Sequence[Any]) -> Candidate | None:
    if x.device.type != "cuda":
        return None
    packed = [torch.ops.aten._convert_weight_to_int4pack(weight.values, _INNER_K_TILES) for weight in plain]
    scales = torch.stack((plain[0].scales.t(), plain[0].offsets.t()), dim=2).to(x.dtype).contiguous()
    return lambda index: torch.ops.aten._weight_int4pack_mm(x, packed[index], _GROUP_SIZE, scales)


def linear_op(make_weight: MakeWeight, baselines: Baselines | None = None) -> Op:
    """Return the layer on weights of a form, timed beside others' products."""
    case = partial(linear_case, make_weight=make_weight, baselines=baselines or {})
    return Op(partial(linear_error, make_weight=make_weight), case)


_CHECKED = sizes(
    (1, 4096, 4096), (16, 1008, 1040), (33, 6144, 4096), (64, 28_672, 1024), (300, 1008, 1040), (3, 131, 206)
)
# Rows of whole groups.
_CHECKED_GROUPS = sizes((1, 4096, 4096), (16, 1008, 1056), (33, 6144, 4096), (300, 1008, 1056))
_TIMED = {
    label: shape
    for rows in _ROWS
    for projection, product in LLAMA3_8B.projections.items()
    for label, shape in sizes((rows, *product), prefix=f"{LLAMA3_8B.name} {projection} ").items()
}
fp8_block_weight = partial(fp8_weight, has_blocks=True)
INT4_OP = linear_op(int4_weight, {"_weight_int4pack_mm": _torch_int4})
INT8_OP = linear_op(int8_weight, {"_int_mm": _torch_int8})
FP8_OP = linear_op(fp8_weight, {"_scaled_mm": _torch_fp8})
FP8_BLOCK_OP = linear_op(fp8_block_weight, {"scaled_mm of blocks": _torch_blocks})
# Groups of 32 with offsets, as of AWQ, GPTQ and Q4_K; six bits in groups of 16, as of Q6_K.
q4_k_weight = partial(grouped_weight, number=INT4, group_size=32, num_codes=16)
q6_k_weight = partial(grouped_weight, number=INT8, group_size=16, num_codes=64)
Q4_K_LINEAR = linear_op(q4_k_weight).suite("q4_k_linear", _CHECKED_GROUPS, _TIMED)
Q6_K_LINEAR = linear_op(q6_k_weight).suite("q6_k_linear", _CHECKED_GROUPS, _TIMED)
INT4_LINEAR = INT4_OP.suite("int4_linear", _CHECKED, _TIMED)
INT8_LINEAR = INT8_OP.suite("int8_linear", _CHECKED, _TIMED)
FP8_LINEAR = FP8_OP.suite("fp8_linear", _CHECKED, _TIMED)
FP8_BLOCK_LINEAR = FP8_BLOCK_OP.suite("fp8_block_linear", _CHECKED, _TIMED)


def product_error(device: torch.device, num_rows: int, out_features: int, in_features: int) -> float:
    """Compare with float64."""
    inputs = torch.randn(num_rows, in_features, device=device).bfloat16()
    weight = torch.randn(out_features, in_features, device=device).bfloat16()
    return relative_error(F.linear(inputs, weight), inputs.double() @ weight.double().T)


def product_case(device: torch.device, num_rows: int, out_features: int, in_features: int) -> Case:
    """Read the weight once."""
    weight_size = out_features * in_features
    num_bytes = 2 * (weight_size + num_rows * (in_features + out_features))
    calls = {OURS: partial(F.linear, random_inputs(device, num_rows, in_features))}
    made = rotated(2 * weight_size, lambda: (random_inputs(device, out_features, in_features),), calls)
    return Case(num_bytes, 2 * num_rows * weight_size, *made)


def _timed() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for model in DENSE_MODELS:
        is_first = model is LLAMA3_8B
        # The products with one vector come first: they are what the first hour asks for.
        for rows in (1, 4, 16, 32, 64) if is_first else (1, 16):
            head = {"head": (model.vocab_size, model.hidden_size)} if is_first else {}
            for name, product in (model.projections | head).items():
                yield from sizes((rows, *product), prefix=f"{model.name} {name} ").items()


DENSE_LINEAR = Op(product_error, product_case).suite(
    "dense_linear", sizes((1, 4096, 4096), (16, 1000, 1032), (3, 131, 203), prefix="bf16 "), dict(_timed())
)
