"""All goals, in the order in which they are reported: what is measured, what is good enough, what others published.

Goals in times or rates were set on one machine and judge another only roughly; goals as a multiple of a baseline carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial

from ops.bench.report.figures import (
    Figure,
    Measure,
    engine,
    gateway,
    idle_percent,
    kernel_floors,
    kernel_fraction,
    kernel_time,
    speculation,
    step_ms,
    token_rate,
)


class Section(Enum):
    """Parts of the report, by the results file that each is read from."""

    GATEWAY = "gateway"
    ENGINE = "engine"
    SERVED = "served"
    SPECULATION = "spec"
    GPU = "gpu"


class Kind(Enum):
    """How a figure is held against its bound: as it is, or as a multiple of the baseline of the same run."""

    AT_LEAST = "≥ {bound} {unit}"
    AT_MOST = "≤ {bound} {unit}"
    TIMES = "≥ {bound} × baseline"
    FRACTION = "≤ baseline / {bound}"


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure to beat.

    Attributes:
        bound: The figure that is good enough; of a multiple, how many times better than the baseline.
        unit: Of the measured figure.
        others: The highest figure others published or were measured at, in the words of its source.
        measure: Finds the figure in a run; None while no benchmark takes it.
    """

    section: Section
    what: str
    kind: Kind
    bound: float
    unit: str = ""
    others: str = ""
    measure: Measure | None = None

    @property
    def text(self) -> str:
        """The goal in words."""
        is_multiple = self.kind in (Kind.TIMES, Kind.FRACTION)
        bound = f"{self.bound:g}" if is_multiple else f"{self.bound:,g}"
        return self.kind.value.format(bound=bound, unit=self.unit).strip()

    def ratio(self, figure: Figure) -> float | None:
        """Return how many times better than the baseline ours is; below 1 it is worse."""
        if not figure.baseline or not figure.value:
            return None
        is_cost = self.kind in (Kind.AT_MOST, Kind.FRACTION)
        return figure.baseline / figure.value if is_cost else figure.value / figure.baseline

    def reached(self, figure: Figure) -> float | None:
        """Return which fraction of the goal is reached; 1 and above is met."""
        if self.kind is Kind.AT_LEAST:
            return figure.value / self.bound
        if self.kind is Kind.AT_MOST:
            return self.bound / figure.value if figure.value > 0 else float("inf")
        ratio = self.ratio(figure)
        return None if ratio is None else ratio / self.bound


_LEAST, _MOST, _TIMES, _FRACTION = Kind.AT_LEAST, Kind.AT_MOST, Kind.TIMES, Kind.FRACTION
_paced = partial(gateway, concurrency=256, step_ms=10.0)
_saturated = partial(gateway, concurrency=256, step_ms=1.0)
_first_of_one = gateway("ttft_p50_ms", concurrency=1, step_ms=10.0)
_burst = gateway("requests_per_s", concurrency=64, step_ms=1.0, is_burst=True)
_decode, _prefill = partial(engine, "decode_tokens_per_s"), partial(engine, "prefill_tokens_per_s", peer="vLLM CPU")
_ROUTERS = "sglang-router 113–134k, vllm-router 124–127k"

GATEWAY_GOALS = tuple(
    Goal(Section.GATEWAY, *row)
    for row in (
        ("CPU per token, 256 streams, one token per 10 ms", _MOST, 10, "µs",
         "vllm-router 14.1, sglang-router 14.8", _paced("us_per_token")),
        ("tokens/s of one process, saturated", _LEAST, 200_000, "tokens/s", _ROUTERS, _saturated("tokens_per_s")),
        ("token delay p99, saturated", _MOST, 15, "ms",
         "vllm-router 165–198, sglang-router 183–279", _saturated("delay_p99_ms")),
        ("time to first token p50, one stream", _MOST, 1, "ms", "vllm-router adds 0.38", _first_of_one),
        ("time to first token p99, 256 streams", _MOST, 2, "ms",
         "vllm-router 3–3.6, sglang-router 49", _paced("ttft_p99_ms")),
        ("one-token requests/s per core", _LEAST, 5000, "requests/s", "vllm-router 17.5k", _burst),
        ("memory of an idle stream", _MOST, 50, "KB", "", None),
        ("rate of N gateway processes on N cores, of N times one's", _LEAST, 1, "", "", None),
    )
)  # fmt: skip


def _engine_goals() -> list[Goal]:
    goals = [
        Goal(
            Section.ENGINE,
            f"{model.upper()} bf16, decode at batch {batch}",
            _TIMES,
            1.0 if batch == 1 else 1.2,
            "tokens/s",
            others,
            _decode(model=model, batch=batch),
        )
        for model, by_batch in (
            ("160m", ("llama.cpp 149", "llama.cpp 312–328, vLLM CPU 310–365", "vLLM CPU 717–822", "vLLM CPU 907–1008")),
            ("15m", ("llama.cpp 1180–1340", "llama.cpp 1870", "llama.cpp 2570", "llama.cpp 2700")),
            ("160m-moe", ("", "", "", "")),
            ("160m-hybrid", ("", "", "", "")),
        )
        for batch, others in zip((1, 4, 16, 32), by_batch, strict=True)
    ]
    for model, others in (("160m", "vLLM CPU 3.5k"), ("15m", "")):
        what, measure = f"{model.upper()} bf16, prefill, 32 prompts", _prefill(model=model, batch=32)
        goals.append(Goal(Section.ENGINE, what, _TIMES, 1, "tokens/s", others, measure))
    for batch, bound, others in (
        (1, 330, "llama.cpp Q4_0 327"),
        (4, 750, "llama.cpp Q4_0 606"),
        (16, 1250, "vLLM CPU W8A8 796–922"),
        (32, 1500, "vLLM CPU W8A8 989–1128"),
    ):
        what = f"160M at its best precision, decode at batch {batch}"
        measure = _decode(model="160m", batch=batch, dtype=None)
        goals.append(Goal(Section.ENGINE, what, _LEAST, bound, "tokens/s", others, measure))
    share = engine("bandwidth_fraction", model="160m", batch=1)
    goals.append(Goal(Section.ENGINE, "160M bf16, share of memory bandwidth at batch 1", _LEAST, 0.8, measure=share))
    return goals


def _streams(count: int) -> str:
    return f"{count} stream{'s' if count > 1 else ''}"


SERVED_GOALS = tuple(
    Goal(
        Section.SERVED,
        f"{model.upper()} bf16 through the queue, decode of {_streams(batch)}",
        _TIMES,
        1.0 if batch == 1 else 1.2,
        "tokens/s",
        measure=_decode(model=model, batch=batch),
    )
    for model in ("160m", "15m")
    for batch in (1, 4, 16, 32)
)

_DEMO = "model"
# The last two are deleted. They count as long as no run without them is recorded.
_PROPOSERS = ("ngram", "draft", "eagle", "mtp", "medusa", "self")
DRAFT_GOALS = tuple(
    Goal(Section.SPECULATION, f"demo model, {what}", _TIMES, bound, "tokens/s", others, measure)
    for what, bound, others, measure in (
        ("one stream, its draft model or EAGLE layer", 1.6, "EAGLE-3 2.36 × on GPUs",
         speculation(_DEMO, 1, "draft", "eagle")),
        ("one stream that copies, look-up", 2.0, "n-gram 2.8 × on GPUs", speculation(_DEMO, 1, "ngram")),
        *((f"{_streams(batch)}, the proposer that serves worst", 0.97, "",
           speculation(_DEMO, batch, *_PROPOSERS, choose=min))
          for batch in (1, 4, 16, 32)),
    )
)  # fmt: skip

# On a GPU. Those without a measure have no bench yet.
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

GOALS: tuple[Goal, ...] = (
    *GATEWAY_GOALS,
    *_engine_goals(),
    *SERVED_GOALS,
    *DRAFT_GOALS,
    *GPU_GOALS,
)
