"""How many devices a load takes: what one worker serves in a steady state, option by option.

In a steady state a worker that runs `b` sequences decodes `b` tokens a step; each sequence is `output` steps in it, and
brings a prompt. So prompts come with the share `b * prompts' chunks / output` of all steps, and the others decode only.
Source of the number of sequences: Little's law, `b = requests a second * output * seconds of a step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from ops.sizing.devices import Device
from ops.sizing.model_size import BLOCK_SIZE, CACHE_DTYPES, FORMATS, ModelSize
from ops.sizing.roofline import HOST_TIMES, Roofline
from shared.errors import ConfigError

FULL_SHARE = 0.8
"""Of what a worker can serve that is planned for: closer to that, requests that come at random wait long."""
LEAST_LAYER_S = 100e-6
"""A layer's part of a step in the worked examples is at least 130 µs. In less, launches of kernels, which the formula
lacks, are a good part of it (Spector et al., Look Ma, No Bubbles!, 2025: half of the time or more of a 1B model)."""
RANKS = (1, 2, 4, 8)
MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """The load to serve, and its latency limits.

    Attributes:
        rate: Requests a second, each with `prompt` tokens and an answer of `output`.
        ttft_s: Longest time to first token of a request that finds no queue.
        itl_s: Longest mean time between tokens.
    """

    rate: float
    prompt: int
    output: int
    ttft_s: float = math.inf
    itl_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker is started with, as its options have it."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    utilization: float


@dataclass(frozen=True, slots=True)
class Steady:
    """A worker that runs `batch` sequences all the time. Times are seconds.

    Attributes:
        requests_per_s: That it serves.
        itl_s: Mean time between tokens.
        ttft_s: Of a request that comes while the queue is empty.
    """

    batch: int
    requests_per_s: float
    itl_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve a load.

    Attributes:
        weights: Number format of weights; `cache` of keys and values.
        ranks: Devices of a worker.
        num_blocks: Of a worker.
        concurrency: Sequences of the load's length that fit into a worker's memory, and its limit of sequences.
        most: The worker as full as it may be.
        usual: The worker with its part of the load.
        workers: How many it takes.
    """

    weights: str
    cache: str
    ranks: int
    roofline: Roofline
    num_blocks: int
    concurrency: int
    most: Steady
    usual: Steady
    workers: int

    @property
    def devices(self) -> int:
        """Of all workers."""
        return self.workers * self.ranks

    @property
    def is_short_stepped(self) -> bool:
        """Whether its steps are shorter than those that the formula was compared with: real ones take longer."""
        return self.usual.itl_s < LEAST_LAYER_S * self.roofline.size.config.num_layers

    def cost_per_million(self, price: float, load: Workload) -> float:
        """Return the cost of a million output tokens at a device's price for an hour."""
        return self.devices * price / 3600 / (load.rate * load.output) * 1e6


def rounded(value: float, decimals: int) -> float:
    """Round to `decimals` places, or to three significant digits if that keeps more."""
    return round(value, decimals if not value else max(decimals, 2 - math.floor(math.log10(abs(value)))))


def steady(roofline: Roofline, batch: int, load: Workload, max_num_batched_tokens: int) -> Steady | None:
    """Return the performance of a worker with `batch` sequences; None if prefill alone exceeds its steps."""
    chunk = min(load.prompt, max_num_batched_tokens - batch)
    if chunk <= 0:
        return None
    num_chunks = math.ceil(load.prompt / chunk)
    share = batch * num_chunks / load.output
    context = batch * (load.prompt + load.output // 2)
    # Several prompts in one step, where there are more than steps.
    together = max(1.0, share)
    if together * load.prompt / num_chunks > max_num_batched_tokens - batch:
        return None
    behind = (load.prompt - load.prompt // num_chunks) // 2
    prompts = [(behind, max(1, round(together * load.prompt / num_chunks)))]
    decode_s = roofline.seconds(batch, context, []) + HOST_TIMES.seconds(batch)
    mixed_s = roofline.seconds(batch, context, prompts) + HOST_TIMES.seconds(batch + together)
    step_s = (1 - min(1.0, share)) * decode_s + min(1.0, share) * mixed_s
    return Steady(batch, batch / (load.output * step_s), step_s, step_s / 2 + num_chunks * mixed_s)


def option(size: ModelSize, device: Device, load: Workload, limits: Limits, names: tuple[str, str, int]) -> Option:
    """Work out one option: formats of weights and cache, and devices of a worker.

    Raises:
        ConfigError: It is unsupported, does not fit, or cannot keep the times asked for.
    """
    weights, cache, ranks = names
    roofline = Roofline(size, device, FORMATS[weights], CACHE_DTYPES[cache], ranks)
    num_tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
    num_blocks = roofline.num_blocks(limits.max_model_len, num_tokens, limits.max_num_seqs, limits.utilization)
    each = math.ceil((load.prompt + load.output) / BLOCK_SIZE)
    concurrency = min(limits.max_num_seqs, num_blocks // each)
    states = [
        state
        for batch in range(1, concurrency + 1)
        if (state := steady(roofline, batch, load, num_tokens)) is not None
        and state.itl_s <= load.itl_s
        and state.ttft_s <= load.ttft_s
    ]
    if not states:
        alone = steady(roofline, 1, load, num_tokens)
        times = (
            ""
            if alone is None
            else f": TTFT {rounded(1e3 * alone.ttft_s, 1)} ms, ITL {rounded(1e3 * alone.itl_s, 2)} ms"
        )
        problem = f"not even one sequence at a time keeps the times that are asked for{times}"
        raise ConfigError("HEADRACE_DEVICE", problem)
    most = max(states, key=lambda state: state.requests_per_s)
    workers = max(1, math.ceil(load.rate / (FULL_SHARE * most.requests_per_s)))
    usual = next(state for state in states if state.requests_per_s >= load.rate / workers)
    return Option(weights, cache, ranks, roofline, num_blocks, concurrency, most, usual, workers)


def options(
    size: ModelSize, device: Device, load: Workload, limits: Limits, ranks: tuple[int, ...] = RANKS
) -> tuple[list[Option], list[str]]:
    """Return the options, that with the fewest devices first, and why others are none."""
    found: list[Option] = []
    reasons: list[str] = []
    computes_8bit = device.flops_8bit is not None
    caches = ("bf16", "fp8" if computes_8bit else "int8")
    for weights, cache, count in product(size.formats, caches, ranks):
        name = f"{weights}, cache {cache}, {count} x {device.name}"
        if FORMATS[weights].computes_8bit and not computes_8bit:
            reasons.append(f"weights {weights}: unsupported: {device.name} does not compute in FP8")
        else:
            try:
                found.append(option(size, device, load, limits, (weights, cache, count)))
            except ConfigError as error:
                problem = error.problem.removeprefix(f"{count} x {device.name}: ").removeprefix("is ")
                reasons.append(f"{name}: {problem}")
    found.sort(key=lambda each: (each.devices, each.usual.ttft_s))
    return found, list(dict.fromkeys(reasons))
