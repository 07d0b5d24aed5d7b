"""The goals on a GPU: whole models, kernels, quantized matrices, speculation.

Those without a measure have no bench yet.
"""

from __future__ import annotations

from functools import partial

from ops.bench.report.figures import (
    Measure,
    idle_percent,
    kernel_floors,
    kernel_fraction,
    kernel_time,
    step_ms,
    token_rate,
)
from ops.bench.report.goal import Goal, Kind, Section

_LEAST, _MOST, _TIMES, _FRACTION = Kind.AT_LEAST, Kind.AT_MOST, Kind.TIMES, Kind.FRACTION
_8B, _PROMPT = "Llama-3-8B", "Llama-3-8B 8192 at 8192"
_step = partial(step_ms, "decode_step_8b")
_idle = idle_percent("decode_step_8b", tuple(f"{_8B} {batch} x 1024" for batch in (8, 64, 256)))
_served, _serve_beside = f"{_8B} 256 x 1000 in 500 out", f"{_8B} 64 x 1000 in 100 out"
_Row = tuple[str, Kind, float, str, str, Measure | None]

_MODELS: tuple[_Row, ...] = (
    ("8B bf16 decode step at 1k context, batch 1", _MOST, 4.0, "ms",
     "vLLM 6.4 ms, SGLang 158 tokens/s, both on an H100", _step(f"{_8B} 1 x 1024")),
    ("8B bf16 decode step at 1k context, batch 8", _MOST, 4.3, "ms", "", _step(f"{_8B} 8 x 1024")),
    ("8B bf16 decode step at 1k context, batch 64", _MOST, 6.3, "ms", "", _step(f"{_8B} 64 x 1024")),
    ("8B bf16 decode step at 1k context, batch 256", _MOST, 15, "ms", "", _step(f"{_8B} 256 x 1024")),
    ("8B fp8 decode, batch 1", _LEAST, 470, "tokens/s", "", None),
    ("8B int4 decode, batch 1", _LEAST, 700, "tokens/s", "", None),
    ("GPU idle share of a step, batch ≥ 8", _MOST, 2, "%", "", _idle),
    ("8B bf16, 256 × 1000 in, 500 out", _LEAST, 9000, "tokens/s", "", token_rate("throughput", _served)),
    ("8B fp8 with fp8 KV, 1000 in, 1000 out", _LEAST, 17_700, "tokens/s", "TensorRT-LLM 17.7k on an H200", None),
    ("8B bf16, end to end, beside transformers `generate_batch`", _TIMES, 1.3, "tokens/s", "",
     token_rate("throughput", _serve_beside)),
)  # fmt: skip
_ATTENTION: tuple[_Row, ...] = (
    ("decode attention, 64 × 8k, of bandwidth", _LEAST, 0.92, "", "FlashAttention-3 ≈ 0.90",
     kernel_fraction("decode_attention", f"{_8B} 64 x 8192")),
    ("decode attention, 1 × 32k, of bandwidth", _LEAST, 0.75, "", "",
     kernel_fraction("decode_attention", f"{_8B} 1 x 32768")),
    ("decode attention, fp8 KV, of the bf16 time", _MOST, 0.55, "", "", None),
    ("prefill attention, 8k, of the matmul rate", _LEAST, 0.65, "", "FlashAttention-3 740 TFLOP/s",
     kernel_fraction("chunk_attention", _PROMPT)),
    ("prefill attention, 8k, beside cuDNN", _FRACTION, 0.85, "µs", "",
     kernel_time("chunk_attention", _PROMPT, "SDPA cuDNN")),
)  # fmt: skip
_ELEMENTWISE: tuple[_Row, ...] = tuple(
    row
    for op, size in (("rms_norm", "8192x4096"), ("rope_kv_write", "8192 tokens"), ("silu_mul", "8192x14336"))
    for row in (
        (f"{op}, of bandwidth", _LEAST, 0.90, "", "", kernel_fraction(op, f"{_8B} {size}")),
        (f"{op}, beside torch.compile", _FRACTION, 1.2, "µs", "", kernel_time(op, f"{_8B} {size}", "torch.compile")),
    )
)
_SAMPLING: tuple[_Row, ...] = (
    ("sampling 128 × 128k, reads of the logits", _MOST, 1.3, "", "", kernel_floors("sampling", "128x128256 plain")),
    ("sampling with top-k and top-p, reads of the logits", _MOST, 4, "", "FlashInfer 0.267 ms",
     kernel_floors("sampling", "128x128256 top-k top-p")),
)  # fmt: skip
_UNMEASURED: tuple[_Row, ...] = (
    ("int4 matrix, M 1–16, of bandwidth", _LEAST, 0.80, "", "", None),
    ("int4 matrix, M 1–16, beside cuBLAS bf16", _FRACTION, 3.2, "µs", "Marlin 3.87 ×", None),
    ("int4 matrix, M 1–16, beside torch's int4", _FRACTION, 1.5, "µs", "", None),
    ("int4 matrix, M 64, beside cuBLAS bf16", _FRACTION, 2, "µs", "", None),
    ("fp8 and int8 matrix, M ≥ 2048, beside torch's", _FRACTION, 0.9, "µs", "", None),
    ("fp8 and int8 matrix, M ≤ 64, beside torch's", _FRACTION, 1, "µs", "", None),
    ("verification of 4 drafts at batch 1, of a plain step", _MOST, 1.06, "", "", None),
    ("speculation: speed-up, of the mean accepted length", _LEAST, 0.9, "",
     "EAGLE-3 2.36 ×, n-gram 2.8 × at low load", None),
    ("speculation: speed-up at batch 256", _LEAST, 0.97, "", "n-gram: a 1.8 × slowdown at high load", None),
)  # fmt: skip

GPU_GOALS = tuple(Goal(Section.GPU, *row) for row in (*_MODELS, *_ATTENTION, *_ELEMENTWISE, *_SAMPLING, *_UNMEASURED))
