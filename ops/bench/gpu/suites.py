"""All ops that have a bench, in the order in which they run."""

from __future__ import annotations

from ops.bench.gpu.case import OpSuite
from ops.bench.gpu.cases import attention, elementwise, logits, rotation, small_gemm


def all_suites() -> tuple[OpSuite, ...]:
    """Return the ops, cheap and certain ones first: what comes last suffers when time runs out."""
    return (
        elementwise.RMS_NORM,
        elementwise.SILU_MUL,
        rotation.ROPE_KV_WRITE,
        logits.LOGITS_BITMASK,
        logits.SAMPLING,
        attention.DECODE_ATTENTION,
        attention.CHUNK_ATTENTION,
        small_gemm.SMALL_GEMM,
    )
