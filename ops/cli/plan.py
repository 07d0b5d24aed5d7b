"""`headrace plan`: devices, memory, times and cost of a load, before anything is bought."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.options import check_writable, refuse_unread, settings_command
from ops.cli.parts import require
from ops.cli.simulate import PlacedModel, on_device, show_progress
from ops.cli.status_line import StatusLine
from ops.text_table import aligned
from shared.config import setting
from shared.errors import ConfigError

if TYPE_CHECKING:
    from ops.simulation.gateway import Progress
    from ops.simulation.outcome import Outcome
    from ops.sizing.plan import Limits, Option, Workload

_TESTED_S = 60.0
_MOST_ADDED = 8


@dataclass(frozen=True, slots=True)
class PlanConfig(PlacedModel):
    """What to plan for."""

    rate: float = setting(1.0, "Requests a second.", minimum=1e-3, maximum=1e6)
    prompt: int = setting(500, "Tokens of a prompt.", minimum=1, maximum=1 << 22)
    output: int = setting(200, "Tokens of an answer.", minimum=1, maximum=1 << 22)
    ttft_p99_ms: float | None = setting(
        None,
        "Longest time to first token: of requests that find no queue; with --verify, of 99 in 100 simulated ones.",
        minimum=0.1,
    )
    itl_ms: float | None = setting(None, "Longest mean time between tokens.", minimum=0.01)
    ranks: str = setting("1,2,4,8", "Devices of a worker to compare, separated by commas.")
    max_num_seqs: int = setting(256, "Sequences that run at once in a worker.", minimum=1, maximum=8192)
    max_num_batched_tokens: int = setting(
        8192, "Tokens of a step; no fewer than --max-num-seqs.", minimum=1, maximum=1 << 20
    )
    max_model_len: int | None = setting(None, "Tokens of a sequence; those of the load if not given.", minimum=2)
    verify: bool = setting(
        False, "Simulate the first option for a minute, add workers until --ttft-p99-ms holds, and let one die."
    )
    seed: int = setting(0, "Seed of the simulated requests: the same one draws the same.", minimum=0)
    json: bool = setting(False, "Print JSON.")
    html: Path | None = setting(None, "File for a page with a picture.")


def run(config: PlanConfig) -> int:
    """Say how many devices a load takes.

    A model's config.json and a device's data sheet say the rest. Options stand side by side: number formats and devices
    of a worker, the fewest devices first. Formulas and their sources are in ops/docs/sizing.md; what they do not cover
    is called unsupported.
    """
    if config.model is None:
        raise ConfigError("HEADRACE_MODEL", "is required; see headrace plan --help")
    if not config.verify:
        refuse_unread("without --verify", "seed")
    check_writable("HEADRACE_HTML", config.html)
    require("worker", "torch", "numpy", "safetensors", "tokenizers")
    from ops.sizing.devices import find_device
    from ops.sizing.model_size import read_model_size
    from ops.sizing.plan import Limits, Workload, options

    size, device = read_model_size(config.model), find_device(config.device)
    load = Workload(config.rate, config.prompt, config.output, _seconds(config.ttft_p99_ms), _seconds(config.itl_ms))
    length = config.max_model_len or config.prompt + config.output
    if config.max_model_len is None and length > size.config.max_model_len:
        problem = (
            f"is {config.prompt}; with --output {config.output} it exceeds the model's {size.config.max_model_len}"
        )
        raise ConfigError("HEADRACE_PROMPT", f"{problem} tokens")
    if not config.prompt + config.output <= length <= size.config.max_model_len:
        raise ConfigError(
            "HEADRACE_MAX_MODEL_LEN",
            f"is {length}; the load has {config.prompt + config.output}, the model {size.config.max_model_len} tokens",
        )
    limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, length, config.gpu_memory_utilization)
    found, reasons = options(size, device, load, limits, _ranks(config.ranks))
    if not config.json:
        lines = _lines(config, found, load) if found else ["no option fits"]
        click.echo("\n".join([*lines, *(f"not listed: {reason}" for reason in reasons)]))
        if found and config.ttft_p99_ms is not None and not config.verify:
            click.echo("TTFT is that of a request that finds no queue; the p99 needs --verify.", err=True)
    tests = _tests(config, found[0], load, limits) if found and config.verify else []
    if config.json:
        rows = [_figures(each, load, config.price) for each in found]
        click.echo(json.dumps({"options": rows, "unsupported": reasons, "simulated": tests}, indent=2))
    elif tests:
        click.echo("\n".join(["", *_test_lines(tests)]))
    if config.html is not None:
        config.html.write_text(_page(config, found, tests, load), encoding="utf-8")
    return 0 if found else 1


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1000


def _ranks(text: str) -> tuple[int, ...]:
    from ops.sizing.plan import MAX_RANKS

    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= MAX_RANKS for part in parts):
        raise ConfigError("HEADRACE_RANKS", f"{text!r} is not a list of numbers from 1 to {MAX_RANKS}, like 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def _figures(each: Option, load: Workload, price: float | None) -> dict[str, Any]:
    from ops.sizing.plan import rounded

    figures: dict[str, Any] = {
        "weights": each.weights,
        "cache": each.cache,
        "devices_a_worker": each.ranks,
        "weights_gb_a_device": rounded(each.roofline.weight_bytes / 1e9, 1),
        "cache_tokens": each.num_blocks * 16,
        "sequences_at_once": each.concurrency,
        "running": each.usual.batch,
        "ttft_ms": rounded(1e3 * each.usual.ttft_s, 1),
        "itl_ms": rounded(1e3 * each.usual.itl_s, 2),
        "requests_per_s_at_most": rounded(each.most.requests_per_s, 2),
        "workers": each.workers,
        "devices": each.devices,
    }
    if price is not None:
        figures["cost_per_hour"] = rounded(each.devices * price, 2)
        figures["cost_per_million_output_tokens"] = rounded(each.cost_per_million(price, load), 2)
    return figures


def _lines(config: PlanConfig, found: list[Option], load: Workload) -> list[str]:
    heads = ["weights", "cache", "a worker", "GB", "cache tokens", "fit", "run", "TTFT ms", "ITL ms"]
    heads += ["req/s at most", "workers", "devices"]
    rows = []
    for each in found:
        figures = _figures(each, load, config.price)
        figures["itl_ms"] = f"{figures['itl_ms']}{'*' if each.is_short_stepped else ''}"
        rows.append([str(value) for value in figures.values()])
    lines = aligned([heads + (["cost/h", "cost/M out"] if config.price is not None else []), *rows])
    if any(each.is_short_stepped for each in found):
        lines.append("* shorter steps than the formulas were compared with (0.1 ms a layer): expect longer ones")
    return lines


def _test_lines(tests: list[dict[str, Any]]) -> list[str]:
    heads = ["simulated", "devices", "TTFT p50 ms", "TTFT p99 ms", "ITL p99 ms", "refused", "moved", "load"]
    rows = [[str(value) for value in test.values()][: len(heads)] for test in tests]
    return aligned([heads, *rows])


def _tests(config: PlanConfig, best: Option, load: Workload, limits: Limits) -> list[dict[str, Any]]:
    """Simulate an option: with more and more workers until its times hold, then with one that dies."""
    tests: list[dict[str, Any]] = []
    status = StatusLine()

    def holds(workers: int, more: str, kills: tuple[tuple[int, float], ...] = ()) -> bool:
        name = f"{workers} workers{more}"
        report = partial(show_progress, status, f"{name}: ")
        outcome = _simulated(config, best, load, limits, workers, kills, report)
        load_share = load.rate / (workers * best.most.requests_per_s)
        tests.append(_test(name, workers * best.ranks, outcome, load_share))
        return outcome.ttft_s[99] <= load.ttft_s and not outcome.num_given_up

    enough = range(best.workers, best.workers + _MOST_ADDED + 1)
    workers = next((count for count in enough if holds(count, "")), enough[-1])
    kills = ((0, _TESTED_S / 2),)
    _ = holds(workers, ", one dies", kills) or holds(workers + 1, ", one dies", kills)
    status.clear()
    return tests


def _test(name: str, devices: int, outcome: Outcome, load_share: float) -> dict[str, Any]:
    from ops.sizing.plan import rounded

    return {
        "name": name,
        "devices": devices,
        "ttft_p50_ms": rounded(1e3 * outcome.ttft_s[50], 1),
        "ttft_p99_ms": rounded(1e3 * outcome.ttft_s[99], 1),
        "itl_p99_ms": rounded(1e3 * outcome.itl_s[99], 1),
        "refused": f"{outcome.refused_share:.2%}",
        "moved": outcome.num_moves,
        "load": f"{load_share:.0%}",
    }


def _simulated(
    config: PlanConfig,
    each: Option,
    load: Workload,
    limits: Limits,
    workers: int,
    kills: tuple[tuple[int, float], ...],
    report: Callable[[Progress], None],
) -> Outcome:
    from ops.simulation.scenario import Scenario, simulate
    from ops.simulation.workload import Synthetic

    names = (each.weights, each.cache, each.ranks)
    sizes, times = on_device(config, names, (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len))
    drawn = Synthetic(math.ceil(load.rate * _TESTED_S), load.rate, load.prompt, load.output)
    scenario = Scenario(workers, sizes, times, kills=kills, seed=config.seed)
    return simulate(scenario, drawn.arrivals(config.seed), report)


def _page(config: PlanConfig, found: list[Option], tests: list[dict[str, Any]], load: Workload) -> str:
    from ops.chart import bar_chart, page

    named = {f"{each.weights}/{each.cache} x{each.ranks}": each for each in found[:8]}
    charts = [
        bar_chart("Devices", [(name, float(each.devices)) for name, each in named.items()]),
        bar_chart("ITL, ms", [(name, 1e3 * each.usual.itl_s) for name, each in named.items()]),
    ]
    if tests:
        charts.append(bar_chart("Simulated TTFT p99, ms", [(test["name"], test["ttft_p99_ms"]) for test in tests]))
    title = f"{load.rate:g} requests/s of {load.prompt}/{load.output} on {config.device}"
    lines = _lines(config, found, load) if found else []
    return page(title, [*lines, "", *(_test_lines(tests) if tests else [])], charts)


command = settings_command(PlanConfig, "plan", run)
