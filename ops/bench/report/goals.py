"""The goals that need no GPU, and all goals in the order in which they are reported."""

from __future__ import annotations

from functools import partial

from ops.bench.report.figures import (
    engine,
    gateway,
    prefix_cache_cost,
    prefix_cache_hit,
    speculation,
    worst_speculation,
)
from ops.bench.report.goal import Goal, Kind, Section
from ops.bench.report.gpu_goals import GPU_GOALS

_LEAST, _MOST, _TIMES, _FRACTION = Kind.AT_LEAST, Kind.AT_MOST, Kind.TIMES, Kind.FRACTION
_paced = partial(gateway, concurrency=256, step_ms=10.0)
_saturated = partial(gateway, concurrency=256, step_ms=1.0)
_first_of_one = gateway("ttft_p50_ms", concurrency=1, step_ms=10.0)
_burst = gateway("requests_per_s", concurrency=64, step_ms=1.0, is_burst=True)
_decode, _prefill = partial(engine, "decode_tokens_per_s"), partial(engine, "prefill_tokens_per_s", peer="vLLM CPU")
_ROUTERS = "sglang-router 113–134k, vllm-router 124–127k"

GATEWAY_GOALS = tuple(
    Goal(Section.GATEWAY, what, kind, bound, unit, others, measure)
    for what, kind, bound, unit, others, measure in (
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

PREFIX_CACHE_GOALS = tuple(
    Goal(Section.PREFIX_CACHE, f"prefix cache: {what}", kind, bound, unit, others, measure)
    for what, kind, bound, unit, others, measure in (
        ("cost where nothing hits", _MOST, 1, "%", "vLLM < 1 %", prefix_cache_cost()),
        ("time to first token, 99 % of it known", _FRACTION, 20, "ms", "", prefix_cache_hit()),
    )
)

_DEMO = "model"
DRAFT_GOALS = tuple(
    Goal(Section.SPECULATION, f"demo model, {what}", _TIMES, bound, "tokens/s", others, measure)
    for what, bound, others, measure in (
        ("one stream, its draft model or EAGLE layer", 1.6, "EAGLE-3 2.36 × on GPUs",
         speculation(_DEMO, 1, "draft", "eagle")),
        ("one stream that copies, look-up", 2.0, "n-gram 2.8 × on GPUs", speculation(_DEMO, 1, "ngram")),
        *((f"{_streams(batch)}, the proposer that serves worst", 0.97, "", worst_speculation(_DEMO, batch))
          for batch in (1, 4, 16, 32)),
    )
)  # fmt: skip

GOALS: tuple[Goal, ...] = (
    *GATEWAY_GOALS,
    *_engine_goals(),
    *SERVED_GOALS,
    *PREFIX_CACHE_GOALS,
    *DRAFT_GOALS,
    *GPU_GOALS,
)
