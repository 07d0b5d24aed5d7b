"""The goals that need no GPU, and all goals in the order in which they are reported."""

from __future__ import annotations

from functools import partial

from ops.bench.report_figures import (
    engine,
    gateway,
    prefix_cache_cost,
    prefix_cache_hit,
    speculation,
    worst_speculation,
)
from ops.bench.report_goal import Goal, Section
from ops.bench.report_gpu_goals import KERNEL_GOALS, MATRIX_GOALS, MODEL_GOALS, SPECULATION_GOALS

_gateway_goal = partial(Goal, Section.GATEWAY)
_engine_goal = partial(Goal, Section.ENGINE)
_served_goal = partial(Goal, Section.SERVED)
_prefix_cache_goal = partial(Goal, Section.PREFIX_CACHE)
_drafts_goal = partial(Goal, Section.SPECULATION, unit="tokens/s", is_multiple=True)
_paced = partial(gateway, concurrency=256, step_ms=10.0)
_saturated = partial(gateway, concurrency=256, step_ms=1.0)
_DECODE, _PREFILL = "decode_tokens_per_s", "prefill_tokens_per_s"

GATEWAY_GOALS = (
    _gateway_goal(
        "CPU per token, 256 streams, one token per 10 ms",
        "µs",
        10,
        is_cost=True,
        reference="vllm-router 14.1, sglang-router 14.8",
        measure=_paced("us_per_token"),
    ),
    _gateway_goal(
        "tokens/s of one process, saturated",
        "tokens/s",
        200_000,
        reference="sglang-router 113–134k, vllm-router 124–127k",
        measure=_saturated("tokens_per_s"),
    ),
    _gateway_goal(
        "token delay p99, saturated",
        "ms",
        15,
        is_cost=True,
        reference="vllm-router 165–198, sglang-router 183–279",
        measure=_saturated("delay_p99_ms"),
    ),
    _gateway_goal(
        "time to first token p50, one stream",
        "ms",
        1,
        is_cost=True,
        reference="vllm-router adds 0.38",
        measure=gateway("ttft_p50_ms", concurrency=1, step_ms=10.0),
    ),
    _gateway_goal(
        "time to first token p99, 256 streams",
        "ms",
        2,
        is_cost=True,
        reference="vllm-router 3–3.6, sglang-router 49",
        measure=_paced("ttft_p99_ms"),
    ),
    _gateway_goal(
        "one-token requests/s per core",
        "requests/s",
        5000,
        reference="vllm-router 17.5k",
        measure=gateway("requests_per_s", concurrency=64, step_ms=1.0, is_burst=True),
    ),
    _gateway_goal("memory of an idle stream", "KB", 50, is_cost=True),
    _gateway_goal("rate of N gateway processes on N cores, of N times one's", "", 1),
)

ENGINE_GOALS = (
    *(
        _engine_goal(
            f"{model.upper()} bf16, decode at batch {batch}",
            "tokens/s",
            1.0 if batch == 1 else 1.2,
            is_multiple=True,
            reference=others,
            measure=engine(_DECODE, model=model, batch=batch),
        )
        for model, batch, others in (
            ("160m", 1, "llama.cpp 149"),
            ("160m", 4, "llama.cpp 312–328, vLLM CPU 310–365"),
            ("160m", 16, "vLLM CPU 717–822"),
            ("160m", 32, "vLLM CPU 907–1008"),
            ("15m", 1, "llama.cpp 1180–1340"),
            ("15m", 4, "llama.cpp 1870"),
            ("15m", 16, "llama.cpp 2570"),
            ("15m", 32, "llama.cpp 2700"),
        )
    ),
    *(
        _engine_goal(
            f"{model.upper()} bf16, prefill, 32 prompts",
            "tokens/s",
            1,
            is_multiple=True,
            reference=others,
            measure=engine(_PREFILL, model=model, batch=32, peer="vLLM CPU"),
        )
        for model, others in (("160m", "vLLM CPU 3.5k"), ("15m", ""))
    ),
    *(
        _engine_goal(
            f"160M at its best precision, decode at batch {batch}",
            "tokens/s",
            bound,
            reference=others,
            measure=engine(_DECODE, model="160m", batch=batch, dtype=None),
        )
        for batch, bound, others in (
            (1, 330, "llama.cpp Q4_0 327"),
            (4, 750, "llama.cpp Q4_0 606"),
            (16, 1250, "vLLM CPU W8A8 796–922"),
            (32, 1500, "vLLM CPU W8A8 989–1128"),
        )
    ),
    _engine_goal(
        "160M bf16, share of memory bandwidth at batch 1",
        "",
        0.8,
        measure=engine("bandwidth_fraction", model="160m", batch=1),
    ),
)

SERVED_GOALS = tuple(
    _served_goal(
        f"{model.upper()} bf16 through the queue, decode of {batch} stream{'s' if batch > 1 else ''}",
        "tokens/s",
        1.0 if batch == 1 else 1.2,
        is_multiple=True,
        measure=engine(_DECODE, model=model, batch=batch),
    )
    for model in ("160m", "15m")
    for batch in (1, 4, 16, 32)
)

PREFIX_CACHE_GOALS = (
    _prefix_cache_goal(
        "prefix cache: cost where nothing hits",
        "%",
        1,
        is_cost=True,
        reference="vLLM < 1 %",
        measure=prefix_cache_cost(),
    ),
    _prefix_cache_goal(
        "prefix cache: time to first token, 99 % of it known",
        "ms",
        20,
        is_cost=True,
        is_multiple=True,
        measure=prefix_cache_hit(),
    ),
)

_DEMO = "model"
DRAFT_GOALS = (
    _drafts_goal(
        "demo model, one stream, its draft model or EAGLE layer",
        bound=1.6,
        reference="EAGLE-3 2.36 × on GPUs",
        measure=speculation(_DEMO, 1, "draft", "eagle"),
    ),
    _drafts_goal(
        "demo model, one stream that copies, look-up",
        bound=2.0,
        reference="n-gram 2.8 × on GPUs",
        measure=speculation(_DEMO, 1, "ngram"),
    ),
    *(
        _drafts_goal(
            f"demo model, {batch} stream{'s' if batch > 1 else ''}, the proposer that serves worst",
            bound=0.97,
            measure=worst_speculation(_DEMO, batch),
        )
        for batch in (1, 4, 16, 32)
    ),
)

GOALS: tuple[Goal, ...] = (
    *GATEWAY_GOALS,
    *ENGINE_GOALS,
    *SERVED_GOALS,
    *PREFIX_CACHE_GOALS,
    *DRAFT_GOALS,
    *MODEL_GOALS,
    *KERNEL_GOALS,
    *MATRIX_GOALS,
    *SPECULATION_GOALS,
)
