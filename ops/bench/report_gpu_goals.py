"""The goals on a GPU: whole models, kernels, quantized matrices, speculation.

Those without a measure have no bench yet.
"""

from __future__ import annotations

from functools import partial

from ops.bench.report_figures import idle_percent, kernel_floors, kernel_fraction, kernel_time, step_ms, token_rate
from ops.bench.report_goal import Goal, Section

_goal = partial(Goal, Section.GPU)
_8B, _PROMPT = "Llama-3-8B", "Llama-3-8B 8192 at 8192"

MODEL_GOALS = (
    *(
        _goal(
            f"8B bf16 decode step at 1k context, batch {batch}",
            "ms",
            bound,
            is_cost=True,
            reference=others,
            measure=step_ms("decode_step_8b", f"{_8B} {batch} x 1024"),
        )
        for batch, bound, others in (
            (1, 4.0, "vLLM 6.4 ms, SGLang 158 tokens/s, both on an H100"),
            (8, 4.3, ""),
            (64, 6.3, ""),
            (256, 15, ""),
        )
    ),
    _goal("8B fp8 decode, batch 1", "tokens/s", 470),
    _goal("8B int4 decode, batch 1", "tokens/s", 700),
    _goal(
        "GPU idle share of a step, batch ≥ 8",
        "%",
        2,
        is_cost=True,
        measure=idle_percent("decode_step_8b", [f"{_8B} {batch} x 1024" for batch in (8, 64, 256)]),
    ),
    _goal(
        "8B bf16, 256 × 1000 in, 500 out",
        "tokens/s",
        9000,
        measure=token_rate("throughput", f"{_8B} 256 x 1000 in 500 out"),
    ),
    _goal(
        "8B fp8 with fp8 KV, 1000 in, 1000 out",
        "tokens/s",
        17_700,
        reference="TensorRT-LLM 17.7k on an H200",
    ),
    _goal(
        "8B bf16, end to end, beside transformers `generate_batch`",
        "tokens/s",
        1.3,
        is_multiple=True,
        measure=token_rate("throughput", f"{_8B} 64 x 1000 in 100 out"),
    ),
)

KERNEL_GOALS = (
    _goal(
        "decode attention, 64 × 8k, of bandwidth",
        "",
        0.92,
        reference="FlashAttention-3 ≈ 0.90",
        measure=kernel_fraction("decode_attention", f"{_8B} 64 x 8192"),
    ),
    _goal(
        "decode attention, 1 × 32k, of bandwidth",
        "",
        0.75,
        measure=kernel_fraction("decode_attention", f"{_8B} 1 x 32768"),
    ),
    _goal("decode attention, fp8 KV, of the bf16 time", "", 0.55, is_cost=True),
    _goal(
        "prefill attention, 8k, of the matmul rate",
        "",
        0.65,
        reference="FlashAttention-3 740 TFLOP/s",
        measure=kernel_fraction("chunk_attention", _PROMPT),
    ),
    _goal(
        "prefill attention, 8k, beside cuDNN",
        "µs",
        0.85,
        is_cost=True,
        is_multiple=True,
        measure=kernel_time("chunk_attention", _PROMPT, "SDPA cuDNN"),
    ),
    *(
        goal
        for op, shape in (
            ("rms_norm", f"{_8B} 8192x4096"),
            ("rope_kv_write", f"{_8B} 8192 tokens"),
            ("silu_mul", f"{_8B} 8192x14336"),
        )
        for goal in (
            _goal(f"{op}, of bandwidth", "", 0.90, measure=kernel_fraction(op, shape)),
            _goal(
                f"{op}, beside torch.compile",
                "µs",
                1.2,
                is_cost=True,
                is_multiple=True,
                measure=kernel_time(op, shape, "torch.compile"),
            ),
        )
    ),
    _goal(
        "sampling 128 × 128k, reads of the logits",
        "",
        1.3,
        is_cost=True,
        measure=kernel_floors("sampling", "128x128256 plain"),
    ),
    _goal(
        "sampling with top-k and top-p, reads of the logits",
        "",
        4,
        is_cost=True,
        reference="FlashInfer 0.267 ms",
        measure=kernel_floors("sampling", "128x128256 top-k top-p"),
    ),
)

_matrix_goal = partial(_goal, is_cost=True, is_multiple=True)
MATRIX_GOALS = (
    _goal("int4 matrix, M 1–16, of bandwidth", "", 0.80),
    _matrix_goal("int4 matrix, M 1–16, beside cuBLAS bf16", "µs", 3.2, reference="Marlin 3.87 ×"),
    _matrix_goal("int4 matrix, M 1–16, beside torch's int4", "µs", 1.5),
    _matrix_goal("int4 matrix, M 64, beside cuBLAS bf16", "µs", 2),
    _matrix_goal("fp8 and int8 matrix, M ≥ 2048, beside torch's", "µs", 0.9),
    _matrix_goal("fp8 and int8 matrix, M ≤ 64, beside torch's", "µs", 1),
)

SPECULATION_GOALS = (
    _goal("verification of 4 drafts at batch 1, of a plain step", "", 1.06, is_cost=True),
    _goal(
        "speculation: speed-up, of the mean accepted length",
        "",
        0.9,
        reference="EAGLE-3 2.36 ×, n-gram 2.8 × at low load",
    ),
    _goal("speculation: speed-up at batch 256", "", 0.97, reference="n-gram: a 1.8 × slowdown at high load"),
)
