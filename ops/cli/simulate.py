"""`headrace simulate`: a fleet in virtual time, by the real scheduler and measured or computed step times."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ops.cli.options import check_writable, refuse_unread, settings_command
from ops.cli.parts import require
from ops.cli.status_line import StatusLine
from shared.config import setting
from shared.errors import ConfigError

if TYPE_CHECKING:
    from gpu_worker.core.scheduler_config import SchedulerConfig
    from ops.simulation.gateway import Progress
    from ops.simulation.profile import Profile
    from ops.simulation.scenario import Scenario
    from ops.simulation.step_time import StepTimes
    from ops.simulation.workload import Arrival

_KILL = re.compile(r"w?(\d+)@(\d+(?:\.\d+)?)s?")
BURSTINESS = "1 for a Poisson process; less for bursts, more for even times. vLLM's: shape of a gamma distribution."
_REQUESTS = 10_000
_FORMATS, _CACHES = ("bf16", "fp8", "int4"), ("bf16", "fp8", "int8")


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on devices of a kind."""

    model: Path | None = setting(None, "Directory of a model, or a config.json alone.")
    device: str = setting("h200", "Kind of device: a100, h100, h200, b200, l40s, rtx4090, rtx5090 or mi300x.")
    gpu_memory_utilization: float = setting(0.9, "Share of a device's memory to use.", minimum=0.1, maximum=1)
    price: float | None = setting(
        None, "Price of a device for an hour, in any currency; without it no cost is shown.", minimum=0
    )


@dataclass(frozen=True, slots=True)
class LoadConfig(PlacedModel):
    """How it is stored and divided there, and requests that are drawn."""

    weights: str | None = setting(
        None, "Number format of weights; the checkpoint's, or bf16, if not given.", choices=_FORMATS
    )
    cache_dtype: str = setting("bf16", "Number format of keys and values.", choices=_CACHES)
    tensor_parallel_size: int = setting(1, "Devices of a worker.", minimum=1, maximum=64)
    requests: int | None = setting(
        None, f"How many requests come; {_REQUESTS:,}, or all of a trace, if not given.", minimum=1, maximum=100_000_000
    )
    rate: float | None = setting(None, "Requests a second; all at once if not given.", minimum=1e-6)
    prompt: int = setting(500, "Tokens of a prompt, in the mean.", minimum=1, maximum=1 << 22)
    output: int = setting(200, "Tokens of an answer, in the mean.", minimum=1, maximum=1 << 22)
    spread: float = setting(
        0.0, "How much lengths vary: standard deviation of their logarithm; 0: all equal.", minimum=0, maximum=4
    )
    burstiness: float = setting(1.0, BURSTINESS, minimum=0.01, maximum=1e6)
    tenants: int = setting(1, "Tenants that send requests, all alike.", minimum=1, maximum=100_000)
    shared_prefix: int = setting(0, "Tokens that prompts begin with in common.", minimum=0, maximum=1 << 22)
    prefixes: int = setting(1, "Different beginnings of that length.", minimum=1, maximum=1 << 16)


@dataclass(frozen=True, slots=True)
class SimulateConfig(LoadConfig):
    """What to simulate."""

    workers: int = setting(1, "Workers of the fleet.", minimum=1, maximum=4096)
    cells: int = setting(
        1,
        "Systems that divide workers and requests, each with a queue and a gateway of its own, simulated in processes "
        "side by side: of 4 workers in 2 cells, 0 and 1 are in the first.",
        minimum=1,
        maximum=256,
    )
    trace: Path | None = setting(None, "File of recorded requests, instead of drawn ones; see ops/docs/sizing.md.")
    profile: Path | None = setting(None, "File of measured step times, instead of a model and a device.")
    max_num_seqs: int = setting(256, "Sequences that run at once in a worker.", minimum=1, maximum=8192)
    max_num_batched_tokens: int = setting(8192, "Tokens of a step.", minimum=1, maximum=1 << 20)
    max_model_len: int | None = setting(None, "Tokens of a sequence; the model's own limit if not given.", minimum=2)
    interactive_ttft_slo_s: float = setting(
        10.0, "Requests whose predicted time to first token is longer get a 503.", minimum=0.01
    )
    retries: int = setting(2, "Retries of a refused client, after each Retry-After.", minimum=0, maximum=1000)
    kill: str | None = setting(None, "Workers that die, and after how many seconds: 3@60, or 3@60,4@90.")
    affinity: bool = setting(False, "Requests wait for the worker that holds their prefix, as real workers let them.")
    seed: int = setting(0, "Of all that is drawn: the same seed gives the same bytes.", minimum=0)
    json: bool = setting(False, "Print JSON.")
    html: Path | None = setting(None, "File for a page with plots.")


def run(config: SimulateConfig) -> int:
    """Simulate a fleet that serves requests.

    Scheduler, admission, queue and shedding are the real ones; devices are formulas. Step times come from a profile,
    which `python -m ops.bench.simulate` fits to the CPU engine, or from a model's sizes and a device's data sheet
    (`headrace plan`). The exit status is 1 if none is served, or some waited for ever: all workers of a cell had died.
    """
    from ops.simulation.cells import simulate_cells
    from ops.simulation.report import Cost, figures, html, table
    from ops.simulation.scenario import simulate

    _check_read(config)
    check_writable("HEADRACE_HTML", config.html)
    if config.workers % config.cells:
        problem = f"is {config.cells}; give --workers, a multiple of {config.cells} (it is {config.workers})"
        raise ConfigError("HEADRACE_CELLS", problem)
    scenario, profile = _scenario(config)
    status = StatusLine()
    report = partial(show_progress, status, "")
    if config.cells == 1:
        outcome = simulate(scenario, _arrivals(config), report)
    else:
        outcome = simulate_cells(scenario, partial(_arrivals, config), config.cells, report)
    status.clear()
    errors = {} if profile is None else profile.errors
    num_devices = config.workers * config.tensor_parallel_size
    cost = None if config.price is None else Cost(num_devices, config.price)
    if config.json:
        click.echo(json.dumps(figures(scenario, outcome, cost, errors), indent=2))
    else:
        click.echo("\n".join(table(scenario, outcome, cost, errors)))
    if config.html is not None:
        config.html.write_text(html("Simulation", scenario, outcome, cost, errors), encoding="utf-8")
    return 0 if outcome.num_served and not outcome.num_unserved else 1


def show_progress(status: StatusLine, name: str, progress: Progress) -> None:
    """Show how far a simulation is; `name` says which one."""
    status.show(f"{name}{progress.num_ended:,} requests have ended, {progress.at:,.1f} s are simulated")


def _check_read(config: SimulateConfig) -> None:
    """Refuse options that would not be read beside others."""
    if config.trace is not None:
        drawn = ("rate", "prompt", "output", "spread", "burstiness", "tenants", "shared_prefix", "prefixes")
        refuse_unread("with --trace, which tells when requests come, how long they are and whose", *drawn)
    if config.profile is not None:
        placed = ("model", "device", "gpu_memory_utilization", "weights", "cache_dtype")
        limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        refuse_unread("with --profile, which is of a worker as it was measured", *placed, *limits)
    if config.profile is not None and config.price is None:
        refuse_unread("with --profile unless --price is given", "tensor_parallel_size")
    if config.rate is None:
        refuse_unread("without --rate: all requests come at once", "burstiness")
    if not config.shared_prefix:
        refuse_unread("without --shared-prefix", "prefixes")


def _scenario(config: SimulateConfig) -> tuple[Scenario, Profile | None]:
    """Return the scenario, and the profile from which its times come, if any.

    Raises:
        ConfigError: Settings contradict each other, or the model does not fit.
    """
    from ops.simulation.profile import read_profile
    from ops.simulation.scenario import Scenario

    profile = None if config.profile is None else read_profile(config.profile)
    if profile is not None:
        sizes, times, latency_s = profile.worker.config(), profile.times, profile.latency_s
    else:
        names = (config.weights, config.cache_dtype, config.tensor_parallel_size)
        limits = (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len)
        sizes, times = on_device(config, names, limits)
        latency_s = 0.0
    return Scenario(
        workers=config.workers,
        config=sizes,
        times=times,
        ttft_slo_s=config.interactive_ttft_slo_s,
        latency_s=latency_s,
        max_retries=config.retries,
        kills=_kills(config),
        is_affine=config.affinity,
        seed=config.seed,
    ), profile


def on_device(
    config: PlacedModel, names: tuple[str | None, str, int], limits: tuple[int, int, int | None]
) -> tuple[SchedulerConfig, StepTimes]:
    """Return the scheduler settings and step times of a model on devices; limits of None are the model's own.

    Raises:
        ConfigError: The model is missing, unsupported, or does not fit.
    """
    if config.model is None:
        raise ConfigError("HEADRACE_MODEL", "is required, or --profile; see headrace simulate --help")
    require("worker", "torch", "numpy", "safetensors", "tokenizers")
    from gpu_worker.core.scheduler_config import SchedulerConfig
    from ops.simulation.step_time import StepTimes
    from ops.sizing.devices import find_device
    from ops.sizing.model_size import BLOCK_SIZE, CACHE_DTYPES, FORMATS, read_model_size
    from ops.sizing.roofline import HOST_TIMES, Roofline

    size, device, (weights, cache, ranks) = read_model_size(config.model), find_device(config.device), names
    weights = weights or size.formats[0]
    if weights not in size.formats:
        raise ConfigError("HEADRACE_WEIGHTS", f"is {weights}; the checkpoint stores about {size.formats[0]}")
    max_num_seqs, max_num_batched_tokens, max_model_len = limits
    length = min(max_model_len or size.config.max_model_len, size.config.max_model_len)
    roofline = Roofline(size, device, FORMATS[weights], CACHE_DTYPES[cache], ranks)
    num_tokens = max(max_num_batched_tokens, max_num_seqs)
    try:
        num_blocks = roofline.num_blocks(length, num_tokens, max_num_seqs, config.gpu_memory_utilization)
    except ConfigError as error:
        smaller = [form for form in size.formats if FORMATS[form].bits < FORMATS[weights].bits]
        if device.flops_8bit is None:
            smaller = [form for form in smaller if not FORMATS[form].computes_8bit]
        given = [*(f"--weights {form}" for form in smaller[:1]), f"--tensor-parallel-size {2 * ranks}"]
        if roofline.weight_bytes < device.memory_bytes * config.gpu_memory_utilization:
            given.append("a smaller --max-model-len")
        raise ConfigError(error.variable, f"{error.problem}; give {' or '.join(given)}") from None
    return SchedulerConfig(BLOCK_SIZE, num_blocks, max_num_seqs, num_tokens, length), StepTimes(roofline, HOST_TIMES)


def _arrivals(config: SimulateConfig) -> Iterator[Arrival]:
    from ops.simulation.workload import Synthetic, read_trace

    if config.trace is not None:
        return iter(read_trace(config.trace, config.requests))
    if config.shared_prefix >= config.prompt:
        problem = f"is {config.shared_prefix}; it must be less than --prompt ({config.prompt})"
        raise ConfigError("HEADRACE_SHARED_PREFIX", problem)
    rate = math.inf if config.rate is None else config.rate
    lengths = (config.prompt, config.output, config.spread, config.burstiness)
    load = Synthetic(
        config.requests or _REQUESTS, rate, *lengths, config.tenants, config.shared_prefix, config.prefixes
    )
    return load.arrivals(config.seed)


def _kills(config: SimulateConfig) -> tuple[tuple[int, float], ...]:
    kills = []
    for text in (config.kill or "").split(","):
        if not text:
            continue
        found = _KILL.fullmatch(text.strip())
        if found is None:
            raise ConfigError("HEADRACE_KILL", f"{text!r} is not a worker and a second, like 3@60")
        if int(found[1]) >= config.workers:
            raise ConfigError("HEADRACE_KILL", f"there is no worker {found[1]}; they are 0 to {config.workers - 1}")
        kills.append((int(found[1]), float(found[2])))
    return tuple(kills)


command = settings_command(SimulateConfig, "simulate", run)
