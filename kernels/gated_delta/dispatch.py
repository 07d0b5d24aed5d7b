"""Chooses the implementation of the gated delta rule."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu_library import DTYPE_NUMBERS, CpuLibrary, cpu_library
from kernels.cpu_structures import addresses_of
from kernels.gated_delta.reference import DeltaStep, gated_delta_chunked
from kernels.gpu_config import gpu_of, is_triton_installed
from kernels.matrix_state.walk import can_run
from kernels.state_rows import state_rows_structure


def gated_delta_cpu(library: CpuLibrary, step: DeltaStep) -> torch.Tensor:
    """Do what `kernels.gated_delta.gated_delta` promises."""
    qkv, gates, weights, sizes, result = step.features, step.gates, step.weights, step.sizes, step.empty_result()
    library.gated_delta(
        *addresses_of(qkv, gates, weights.rate, weights.step_bias, result, step.states),
        ctypes.byref(state_rows_structure(step.rows)),
        *(qkv.stride(0), gates.stride(0), sizes.num_key_heads, sizes.num_value_heads, sizes.key_dim, sizes.value_dim),
        *(DTYPE_NUMBERS[qkv.dtype], torch.get_num_threads()),
    )
    return result


def gated_delta(step: DeltaStep) -> torch.Tensor:
    """Update the state of each sequence token by token, and read it with the token's query.

    With the state `S`, a token's query `q` and key `k` (both divided by their length, `q` also by `key_dim**0.5`), its
    value `v`, its decay `exp(-rate * softplus(step + step_bias))` and its strength `sigmoid(strength)`:
    `S = decay * S`, then `S = S + strength * outer(k, v - S^T k)`; the result is `S^T q`.
    Source: Yang et al., arXiv 2412.06464, equation 10.

    On a CPU the result of a token and the state behind it do not depend on how its sequence was cut into steps, to the
    bit.

    Shapes:
        features: `[num_tokens, 2 * num_key_heads * key_dim + num_value_heads * value_dim]`: the query heads, then the
            key heads, then the value heads
        gates: `[num_tokens, 2 * num_value_heads]`: the strengths of all value heads, then their steps
        result: `[num_tokens, num_value_heads, value_dim]`, of the type of `features`
    """
    if step.features.is_cuda and is_triton_installed():
        from kernels.gated_delta.triton_kernel import gated_delta_triton

        return gated_delta_triton(step, gpu_of(step.features.device))
    if can_run(step) and (library := cpu_library()) is not None:
        return gated_delta_cpu(library, step)
    return gated_delta_chunked(step)
