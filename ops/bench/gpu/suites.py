"""All suites, in the order in which they run, and their device."""

from __future__ import annotations

import torch

from ops.bench.gpu.case import OpSuite
from ops.bench.gpu.cases import attention, elementwise, experts, logits, quantized_linear, recurrent, steps
from ops.bench.gpu.timer import CudaTimer, Timer


def device() -> torch.device:
    """Return the GPU."""
    return torch.device("cuda", 0)


def timer() -> Timer:
    """Return what calls on the GPU are timed with."""
    return CudaTimer()


def all_suites() -> tuple[OpSuite, ...]:
    """Return the suites, those first whose figures matter most: what comes last suffers when time runs out."""
    return (
        steps.DECODE_8B,
        attention.DECODE_ATTENTION,
        experts.EXPERTS,
        quantized_linear.INT4_LINEAR,
        steps.CODED_MIXTURE_STEPS,
        steps.DECODE_8B_LONG,
        steps.DECODE_8B_ROUNDED,
        quantized_linear.DENSE_LINEAR,
        quantized_linear.Q4_K_LINEAR,
        quantized_linear.Q6_K_LINEAR,
        steps.DECODE_32B,
        steps.PREFILL_8B,
        steps.SHARD_70B,
        steps.VERIFICATION,
        attention.CHUNK_ATTENTION,
        quantized_linear.FP8_LINEAR,
        attention.ATTENTION_FORMS,
        recurrent.RECURRENT,
        steps.MIXTURE_STEPS,
        steps.LATENT_STEPS,
        steps.HYBRID_STEPS,
        logits.SAMPLING,
        quantized_linear.INT8_LINEAR,
        quantized_linear.FP8_BLOCK_LINEAR,
        steps.THROUGHPUT,
        steps.PREFIX_CACHE,
        steps.DECODE_06B,
        steps.DECODE_4B,
        elementwise.RMS_NORM,
        elementwise.SILU_MUL,
        elementwise.ROPE_KV_WRITE,
        steps.PREFILL_32B,
        steps.PREFILL_06B,
        steps.PREFILL_4B,
        logits.LOGITS_BITMASK,
    )
