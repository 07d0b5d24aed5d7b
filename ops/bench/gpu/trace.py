"""The command `python -m ops.bench.gpu.trace`: which kernels a decode step is made of, and the gaps between them.

Steps are captured in a graph and replayed under torch's profiler, which sees every kernel of a graph. Printed and
recorded are, of one replay, the time of each kernel and how often it runs, the time in which none ran, and the whole.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from ops.bench.gpu.results import machine_of
from ops.bench.gpu.shapes import GPT_OSS_20B, LLAMA3_8B, QWEN3_06B, ModelShape
from ops.bench.record import append_lines, bench_parser, origin, positive

NUM_REPLAYS = 20
_CONTEXT = 1024
_NUM_SHOWN = 12
_NAME_WIDTH = 90
_RESULTS = Path(__file__).parents[1] / "results"
# Models, sequences of a step and what weights are rounded to: what the first hour asks, and the smallest that runs
# anywhere.
STEPS: dict[str, tuple[ModelShape, int, str | None]] = {
    "8b_1": (LLAMA3_8B, 1, None),
    "8b_64": (LLAMA3_8B, 64, None),
    "8b_fp8_1": (LLAMA3_8B, 1, "fp8"),
    "oss_1": (GPT_OSS_20B, 1, None),
    "0.6b_1": (QWEN3_06B, 1, None),
}
_FIRST_HOUR = ("8b_1", "8b_64", "8b_fp8_1", "oss_1")


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel that ran: its name, and when, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One replay on average.

    Attributes:
        kernels: Of each name: how often it ran, and its microseconds, the longest first.
        busy_us: In which a kernel ran.
        gaps_us: In which none did, between two kernels of a replay.
    """

    kernels: dict[str, tuple[float, float]]
    busy_us: float
    gaps_us: float


def summarise(spans: Iterable[Span], num_replays: int) -> StepTrace:
    """Add up the kernels of some replays, one of which follows the other without a pause."""
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    busy = gaps = 0.0
    end: float | None = None
    for span in sorted(spans, key=lambda span: span.start):
        counts[span.name] += 1
        seconds[span.name] += span.end - span.start  # type: ignore[assignment]
        if end is not None:
            gaps += max(0.0, span.start - end)
        # Kernels that are launched dependently overlap.
        busy += max(0.0, span.end - max(span.start, span.start if end is None else end))
        end = span.end if end is None else max(end, span.end)
    kernels = {name: (counts[name] / num_replays, time / num_replays) for name, time in seconds.most_common()}
    return StepTrace(kernels, busy / num_replays, gaps / num_replays)


def trace_step(step: Callable[[int], object], device: torch.device, num_replays: int = NUM_REPLAYS) -> StepTrace:
    """Replay a step, or call it again and again where there are no graphs, under the profiler."""
    activity, is_gpu = torch.profiler.ProfilerActivity, device.type == "cuda"
    run = _captured(step) if is_gpu else (lambda: step(0))
    run()
    with torch.profiler.profile(activities=[activity.CUDA if is_gpu else activity.CPU]) as profile:
        for _ in range(num_replays):
            run()
        if is_gpu:
            torch.cuda.synchronize(device)
    events: Any = profile.events()
    # Of calls on a host those alone that no other one made.
    kind = DeviceType.CUDA if is_gpu else DeviceType.CPU
    found = [event for event in events if event.device_type == kind and event.cpu_parent is None]
    return summarise((Span(event.name, event.time_range.start, event.time_range.end) for event in found), num_replays)


def _captured(step: Callable[[int], object]) -> Callable[[], object]:
    for _ in range(3):
        step(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0)
    return graph.replay


def decode_step(
    shape: ModelShape, num_seqs: int, context: int, device: torch.device, rounded: str | None = None
) -> Callable[[int], object]:
    """Return a decode of a number of sequences, each with a context."""
    from ops.bench.gpu.step.random_model import random_model
    from ops.bench.gpu.step.step_engine import StaticStep, StepEngine
    from ops.bench.gpu.step.steps import RoundedLinears

    max_model_len = context + 16
    linears = None if rounded is None else RoundedLinears(rounded)
    model, _ = random_model(shape, max_model_len, device, keeps_tensors=False if rounded else None, linears=linears)
    engine = StepEngine(model, num_seqs, max_model_len, has_graphs=False)
    return StaticStep(model, engine.cache, [(1, context)] * num_seqs, max_model_len)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace the steps that are asked for; return 2 without a GPU, unless a CPU is asked for."""
    parser = bench_parser("gpu.trace", __doc__ or "")
    parser.add_argument("--step", action="append", choices=STEPS, help="may be given again; otherwise the first hour's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=positive, help="cut the models to their first layers")
    parser.add_argument("--context", type=positive, default=_CONTEXT)
    parser.add_argument("--replays", type=positive, default=NUM_REPLAYS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("Nothing was traced: torch finds no CUDA device (--device cpu traces the host).", file=sys.stderr)
        return 2
    path = Path(os.environ.get("OUT") or _RESULTS) / "gpu_trace.jsonl"
    command = " ".join(["python -m ops.bench.gpu.trace", *(sys.argv[1:] if arguments is None else arguments)])
    for name in options.step or _FIRST_HOUR:
        shape, num_seqs, rounded = STEPS[name]
        if options.layers:
            shape = shape.first(options.layers)
        trace = trace_step(decode_step(shape, num_seqs, options.context, device, rounded), device, options.replays)
        print("\n".join(_lines(name, trace)), flush=True)
        row = {"step": name, "layers": shape.num_layers, "context": options.context} | machine_of(device)
        sums = {"busy_us": trace.busy_us, "gaps_us": trace.gaps_us, "kernels": trace.kernels}
        append_lines(path, [{**origin(command, ("torch", "triton")), **row, **sums}])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"records: {path}")
    return 0


def _lines(name: str, trace: StepTrace) -> list[str]:
    num_kernels = sum(count for count, _ in trace.kernels.values())
    whole = trace.busy_us + trace.gaps_us
    lines = [
        f"{name}: {whole:.1f} µs a step, {num_kernels:.0f} kernels, {trace.gaps_us:.1f} µs between them "
        f"({trace.gaps_us / whole:.1%})"
    ]
    shown = list(trace.kernels.items())[:_NUM_SHOWN]
    return lines + [f"{time:>10.1f} µs {count:>6.0f} ×  {kernel[:_NAME_WIDTH]}" for kernel, (count, time) in shown]


if __name__ == "__main__":
    sys.exit(main())
