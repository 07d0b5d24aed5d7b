"""`headrace bench serve` and `headrace bench compare`."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.options import SettingsCommand, check_writable, refuse_unread, settings_command
from ops.cli.parts import require
from ops.cli.running_system import find_endpoint, only_model
from ops.cli.simulate import BURSTINESS
from ops.cli.status_line import StatusLine
from ops.stack.config import DEFAULT_STATE_DIR
from shared.config import setting
from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ops.load_generator.driver import Driver
    from ops.load_generator.run import Load

_DATASETS = ("random", "sharegpt", "custom", "trace", "agents")
_EXIT_INTERRUPTED = 130
_LIMIT = re.compile(r"(ttft|itl|tpot|e2el):(\d+(?:\.\d+)?)")
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
_MAX_TOKENS = 1 << 22
_REQUESTS = 1000
# Settings that datasets do not read.
_OF_WORDS = ("random_input_len", "random_prefix_len", "prefixes")
_UNREAD = {
    "random": ("turns",),
    "sharegpt": (*_OF_WORDS, "random_output_len", "spread", "turns"),
    "custom": (*_OF_WORDS, "turns"),
    "trace": (*_OF_WORDS, "random_output_len", "spread", "turns", "burstiness"),
    "agents": ("spread",),
}
_ALWAYS = "the report has the mean, p50, p90 and p99: leave it out"
_INSTEAD = {
    "--base-url": "use --url",
    "--host": "use --url",
    "--save-result": "use --json FILE",
    "--save-detailed": "use --json FILE",
    "--result-filename": "use --json FILE",
    "--random-range-ratio": "use --spread",
    "--tokenizer": "tokens are those that the server counts: leave it out",
    "--percentile-metrics": _ALWAYS,
    "--metric-percentiles": _ALWAYS,
}
_WIDEST_IMAGE = 8192


@dataclass(frozen=True, slots=True)
class WhatConfig:
    """The requests to send."""

    dataset_name: str = setting(
        "random",
        "random words; prompts of a file (sharegpt, custom); times and lengths of a trace; agents of many turns.",
        choices=_DATASETS,
    )
    dataset_path: Path | None = setting(None, "File of prompts, or a trace (Mooncake's, Azure's or our own lines).")
    random_input_len: int = setting(
        1024, "Tokens of a prompt; of agents, those that a turn adds.", minimum=1, maximum=_MAX_TOKENS
    )
    random_output_len: int = setting(
        128, "Tokens of an answer, at most; with --ignore-eos exactly.", minimum=1, maximum=_MAX_TOKENS
    )
    random_prefix_len: int = setting(
        0, "Tokens that prompts begin with in common, before those of their own.", minimum=0, maximum=_MAX_TOKENS
    )
    prefixes: int = setting(1, "Different beginnings of that length.", minimum=1, maximum=1 << 16)
    spread: float = setting(0.0, "Standard deviation of lengths' logarithms; 0: all equal.", minimum=0, maximum=4)
    turns: int = setting(43, "Turns of an agent, in the median.", minimum=2, maximum=160)
    images: int = setting(0, "Random images in each request; needs --backend openai-chat.", minimum=0, maximum=100)
    image_size: str = setting("256x256", "Pixels of an image, as WIDTHxHEIGHT.")
    ignore_eos: bool = setting(False, "Ask for answers of full length; servers of other kinds may refuse the field.")
    extra_body: str = setting("{}", "JSON object with fields of every request.")


@dataclass(frozen=True, slots=True)
class BenchServeConfig(WhatConfig):
    """Whom to ask, how often, and where the results go."""

    url: str | None = setting(None, "Where the server is; found through the state directory if not given.")
    api_key: str | None = setting(None, "API key; found through the state directory if not given.", secret=True)
    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")
    model_name: str | None = setting(None, "Name of the model; the one that is served if not given.", alias="--model")
    backend: str = setting("openai", "openai: completions; openai-chat: chat.", choices=("openai", "openai-chat"))
    requests: int | None = setting(
        None,
        f"How many requests, or conversations of agents; {_REQUESTS}, or all of a trace, if not given.",
        minimum=1,
        maximum=10_000_000,
        alias="--num-prompts",
    )
    request_rate: float | None = setting(
        None, "Requests a second; all at once if not given.", minimum=1e-3, maximum=1e6
    )
    burstiness: float = setting(1.0, BURSTINESS, minimum=0.01, maximum=1e6)
    max_concurrency: int | None = setting(None, "Requests under way at once.", minimum=1, maximum=100_000)
    answer_timeout_s: float = setting(600.0, "Seconds after which a request has failed.", minimum=0.1)
    goodput: str = setting("", "Limits in ms that a good request keeps: ttft:500 itl:50 tpot:40 e2el:9000.")
    seed: int = setting(0, "Of all that is drawn: the same seed sends the same requests.", minimum=0)
    json: Path | None = setting(None, "File for the report, with each request.")
    html: Path | None = setting(None, "File for a page with plots.")


def run_serve(config: BenchServeConfig) -> int:
    """Send requests to any server of OpenAI's API, and report its answers.

    Requests are sent when they are due, however slow the server is, and latencies count from then. Two prompts before
    the run show how many tokens a word has. Ctrl-C ends the run and shows the measurements so far.
    """
    require("gateway", "httptools")
    import uvloop

    from ops.load_generator.connection import Address
    from ops.load_generator.driver import Wire
    from ops.load_generator.run import measure
    from ops.load_generator.summary import as_page, table

    if config.json is not None and config.html is not None and config.json.resolve() == config.html.resolve():
        raise ConfigError("HEADRACE_HTML", f"is {config.html}, which is the file of --json too: give another")
    check_writable("HEADRACE_JSON", config.json)
    check_writable("HEADRACE_HTML", config.html)
    load, fields, slo_ms = _load(config), _fields(config), _limits(config.goodput)
    endpoint = find_endpoint(config.url, config.api_key, config.state_dir)
    model = config.model_name or only_model(endpoint)
    wire = Wire(Address.of_url(endpoint.url, model, endpoint.api_key), config.backend == "openai-chat", fields)
    _raise_file_limit()
    status = StatusLine()
    report = uvloop.run(measure(wire, load, slo_ms, _asked(config), lambda *run: status.show(_told(*run))))
    status.clear()
    click.echo("\n".join(table(report)))
    if config.json is not None:
        import msgspec

        config.json.write_bytes(msgspec.json.encode(report))
    if config.html is not None:
        config.html.write_text(as_page(report), encoding="utf-8")
    if report.num_unfinished:
        return _EXIT_INTERRUPTED
    return 0 if report.summary["completed"] else 1


def run_compare(first: Path, second: Path) -> int:
    """Compare two reports of `headrace bench serve --json`: B with A.

    The intervals hold 95 % of what blocks of requests, drawn again from both runs, give. They cover what varies within
    a run; to know what varies between runs, compare a system with itself first.
    """
    from ops.load_generator.comparison import table
    from ops.load_generator.record import Report, ReportError

    try:
        click.echo("\n".join(table(Report.load_file(first), Report.load_file(second))))
    except ReportError as error:
        raise ReportError(f"{error} (A is {first}, B is {second})") from None
    return 0


def _told(driver: Driver, num_planned: int) -> str:
    """Say how far a run is."""
    records = driver.records
    refused = sum(record.is_refused for record in records)
    failed = sum(record.problem is not None for record in records) - refused
    elapsed_s = max(1e-9, time.monotonic() - driver.started)
    tokens_per_s = sum(record.output_tokens for record in records) / elapsed_s
    first = sorted(record.ttft_s for record in records[-200:] if record.ttft_s is not None)
    ttft = f", first token {1e3 * first[len(first) // 2]:,.0f} ms" if first else ""
    line = f"{elapsed_s:,.0f} s: {len(records):,} of {num_planned:,} ended, {driver.num_running:,} under way, "
    return f"{line}{refused:,} refused, {failed:,} failed; {tokens_per_s:,.0f} tokens/s{ttft}"


def _load(config: BenchServeConfig) -> Load:
    from ops.load_generator.run import Load

    is_file = config.dataset_name in ("sharegpt", "custom", "trace")
    if is_file and config.dataset_path is None:
        raise ConfigError("HEADRACE_DATASET_PATH", f"is required for the dataset {config.dataset_name}")
    if not is_file and config.dataset_path is not None:
        raise ConfigError("HEADRACE_DATASET_PATH", f"is not read for the dataset {config.dataset_name}")
    if config.dataset_name == "trace" and config.request_rate is not None:
        raise ConfigError("HEADRACE_REQUEST_RATE", "is not used with a trace, which has times of its own")
    if config.images and (config.backend != "openai-chat" or config.dataset_name not in ("random", "trace")):
        raise ConfigError("HEADRACE_IMAGES", "needs --backend openai-chat, and the dataset random or trace")
    found = _SIZE.fullmatch(config.image_size)
    if found is None or not all(1 <= int(side) <= _WIDEST_IMAGE for side in found.groups()):
        raise ConfigError("HEADRACE_IMAGE_SIZE", f"{config.image_size!r} is not a size of 1x1 to 8192x8192")
    _check_read(config)
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(Load)}
    if config.dataset_name != "trace":
        given["requests"] = config.requests or _REQUESTS
    return Load(**given | {"image_size": (int(found[1]), int(found[2]))})


def _check_read(config: BenchServeConfig) -> None:
    """Refuse options that would not be read beside others."""
    name = config.dataset_name
    refuse_unread(f"for the dataset {name}", *_UNREAD[name])
    if config.request_rate is None and name != "trace":
        refuse_unread("without --request-rate: all requests are sent at once", "burstiness")
    if not config.random_prefix_len and name == "random":
        refuse_unread("without --random-prefix-len", "prefixes")
    if not config.images:
        refuse_unread("without --images", "image_size")


def _fields(config: BenchServeConfig) -> dict[str, Any]:
    try:
        fields = json.loads(config.extra_body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError("HEADRACE_EXTRA_BODY", f"{config.extra_body!r} is no JSON object")
    return ({"ignore_eos": True} if config.ignore_eos else {}) | fields


def _limits(text: str) -> dict[str, float]:
    limits = {}
    for word in text.replace(",", " ").split():
        found = _LIMIT.fullmatch(word)
        if found is None:
            raise ConfigError(
                "HEADRACE_GOODPUT", f"{word!r} is no limit like ttft:500; there are ttft, itl, tpot, e2el"
            )
        limits[found[1]] = float(found[2])
    return limits


def _asked(config: BenchServeConfig) -> dict[str, Any]:
    """Return the load for the report: the options that differ from their defaults, and never the key."""
    kept = {"api_key", "url", "model_name", "state_dir", "json", "html"}
    values = ((field, getattr(config, field.name)) for field in dataclasses.fields(config) if field.name not in kept)
    return {
        field.name: str(value) if isinstance(value, Path) else value
        for field, value in values
        if value != field.default
    }


def _raise_file_limit() -> None:
    """Let this process have as many connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _ServeCommand(SettingsCommand):
    """Takes the limits of `--goodput` as vLLM does too: several words; and says what stands for its other options."""

    def explain(self, option: str) -> str | None:
        if (advice := _INSTEAD.get(option)) is not None:
            return f"No such option '{option}' (vLLM's): {advice}."
        return super().explain(option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Join the words behind `--goodput`."""
        return super().parse_args(ctx, list(_joined(args)))


def _joined(args: list[str]) -> Iterator[str]:
    words = list(args)
    while words:
        yield (word := words.pop(0))
        limits = list(takewhile(_LIMIT.fullmatch, words)) if word == "--goodput" else []
        if limits:
            yield " ".join(limits)
            del words[: len(limits)]


serve_command = settings_command(BenchServeConfig, "serve", run_serve, kind=_ServeCommand)
_report = click.Path(path_type=Path, dir_okay=False)
_REPORTS: list[click.Parameter] = [
    click.Argument(["first"], metavar="A", type=_report),
    click.Argument(["second"], metavar="B", type=_report),
]
compare_command = click.Command("compare", callback=run_compare, params=_REPORTS, help=run_compare.__doc__)
