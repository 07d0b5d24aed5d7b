"""`headrace up`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from gateway.config import GatewayConfig
from gpu_worker.start.config import WorkerConfig
from ops.cli.options import SettingOption, SettingsCommand, options, resolve_settings
from ops.cli.parts import require
from ops.stack.config import CHOSEN_SETTINGS, UpConfig


def run(**values: Any) -> int:
    """Run the whole system on this machine.

    In the foreground, on loopback: starts NATS, Redis, a gateway and a worker with the demo model, waits until a first
    generation has succeeded, and prints how to use it. Ctrl-C stops everything in order; a second Ctrl-C kills. A part
    that crashes, or stands still, is started again.

    Every setting of `headrace gateway` and `headrace worker` can be given too, except their addresses and the number of
    processes, which are chosen here.
    """
    require("embedded", "starlette", "httptools", "redis", "prometheus_client")
    from ops.stack.run import run as run_stack

    models = values.pop("model")
    own = {name: value for name, value in values.items() if name in _OWN}
    own["model"] = models[0] if models else None
    passed = {_VARIABLES[name]: str(value) for name, value in values.items() if name not in _OWN and value is not None}
    more = tuple(map(Path, models[1:]))
    return run_stack(resolve_settings(UpConfig, own), {**os.environ, **passed}, more)


class UpCommand(SettingsCommand):
    """`headrace up`; it sets some options of its parts itself, and refuses them with the command that accepts them."""

    def explain(self, option: str) -> str | None:
        """Return the error for an unknown option."""
        name = option.removeprefix("--").replace("-", "_")
        if name not in CHOSEN_SETTINGS:
            return super().explain(option)
        told = _OF_PART.format("worker" if name in _OF_WORKERS else "gateway")
        if name == "processes":
            told = "--gateways says how many processes share the port"
        return f"No such option '{option}': `headrace up` chooses this itself; {told}."


_OF_PART = "`headrace {}` has it: see ops/docs/two-hosts.md"
_OF_WORKERS = ("health_port", "health_host")


def _all_options() -> list[SettingOption]:
    gateway = options(GatewayConfig, "Of the gateway", without=_OWN | CHOSEN_SETTINGS)
    named = {option.name or "" for option in gateway}
    worker = options(WorkerConfig, "Of the worker", without=_OWN | CHOSEN_SETTINGS | named)
    return [*options(UpConfig, multiple=("model",)), *gateway, *worker]


_OWN = frozenset(field.name for field in dataclasses.fields(UpConfig))
_OPTIONS = _all_options()
_VARIABLES = {option.name or "": option.variable for option in _OPTIONS}

# What people set first: `--help` shows these.
_FIRST_OPTIONS = (
    *("port", "state_dir", "model", "workers", "gateways", "simulate", "api_key", "ready_file"),
    *("nats_url", "redis_url"),
    *("operator_port", "keys_file", "auth", "cors_origins", "max_streams", "default_timeout_s"),
    *("served_model_name", "chat_format", "device", "dtype", "num_threads", "kv_cache_dtype", "kv_cache_bytes"),
    *("gpu_memory_utilization", "max_model_len", "max_num_seqs", "lora_modules", "speculative", "draft_model"),
    "log_level",
)

command = UpCommand("up", callback=run, params=[*_OPTIONS], help=run.__doc__, first_options=_FIRST_OPTIONS)
