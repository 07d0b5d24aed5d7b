# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Linear layer for up to 64 rows on a GPU, bound by reading the weight once.

The operands are swapped: a program computes `weight[block_n] @ inputs.T`, so that the wide side of the matrix
instruction (64 rows for wgmma) is full of output features, and only the narrow side is padded. Where there are too few
blocks of features to keep all multiprocessors reading, the input features are split, and the parts added in the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import dependent_launch, wait_for_inputs
from kernels.gpu_config import Gpu
from kernels.linear.dense.small_gemm.config import SmallGemmWorkspace, small_gemm_launch, small_gemm_splits
from kernels.linear.product_launch import ProductLaunch
from kernels.linear.split_sums import add_splits


@triton.jit(do_not_specialize=["num_rows"])
def small_gemm_kernel(
    inputs,
    weight,
    outputs,
    partials,
    counters,
    num_rows,
    out_features,
    in_features,
    input_stride,
    weight_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Program (block of features, split). `IS_EVEN`: every split has the same number of whole blocks of inputs."""
    wait_for_inputs()
    block = tl.program_id(0)
    split = tl.program_id(1)
    features = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    # Past the ends the last feature and row are computed once more, and not stored: cheaper than masks.
    weight_rows = tl.minimum(features, out_features - 1).to(tl.int64) * weight_stride
    input_rows = tl.minimum(rows, num_rows - 1).to(tl.int64) * input_stride
    blocks_per_split = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLITS)
    first = split * blocks_per_split * BLOCK_K
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for step in range(blocks_per_split):
        k = first + step * BLOCK_K + columns
        weight_places = weight + weight_rows[:, None] + k[None, :]
        input_places = inputs + input_rows[None, :] + k[:, None]
        if IS_EVEN:
            weights = tl.load(weight_places, eviction_policy="evict_first")
            values = tl.load(input_places, eviction_policy="evict_last")
        else:
            weights = tl.load(weight_places, mask=k[None, :] < in_features, other=0.0, eviction_policy="evict_first")
            values = tl.load(input_places, mask=k[:, None] < in_features, other=0.0, eviction_policy="evict_last")
        sums = tl.dot(weights, values, sums, input_precision="ieee")

    places = rows.to(tl.int64)[None, :] * out_features + features[:, None]
    mask = (rows[None, :] < num_rows) & (features[:, None] < out_features)
    part_size = num_rows.to(tl.int64) * out_features
    sums, is_last = add_splits(sums, partials, counters + block, places, mask, part_size, split, SPLITS)
    if is_last:
        tl.store(outputs + places, sums.to(outputs.dtype.element_ty), mask=mask)


def small_gemm_triton(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    workspace: SmallGemmWorkspace,
    gpu: Gpu,
    launch: ProductLaunch | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Do what `kernels.linear.dense.small_gemm.small_gemm` promises; None takes what the tables say."""
    num_rows, in_features = inputs.shape
    out_features = weight.shape[0]
    launch = launch or small_gemm_launch(gpu.generation, num_rows)
    assert num_rows <= launch.block_m, "a program has all rows"
    num_splits = num_splits or small_gemm_splits(launch, gpu, out_features, in_features)
    outputs = torch.empty((num_rows, out_features), dtype=inputs.dtype, device=inputs.device)
    small_gemm_kernel[(triton.cdiv(out_features, launch.block_n), num_splits)](
        inputs,
        weight,
        outputs,
        workspace.partials,
        workspace.counters,
        num_rows,
        out_features,
        in_features,
        inputs.stride(0),
        weight.stride(0),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        SPLITS=num_splits,
        IS_EVEN=in_features % (launch.block_k * num_splits) == 0,
        num_warps=launch.num_warps,
        **dependent_launch(inputs.device),
        num_stages=launch.num_stages,
    )
    return outputs
