"""What `headrace up` refuses before it starts anything: settings with which a part could not start.

A part refuses them too. But then four processes have been started for nothing, and the reason is in one of their logs.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Mapping

import msgspec

from gateway.config import GatewayConfig
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.golden_baseline import golden_baseline, served_name
from gpu_worker.start.settings_problem import EXIT_BAD_SETTINGS, SettingsProblem
from ops.stack.console import EVERY_S, Console
from ops.stack.plan import Plan
from ops.stack.tether import tethered
from shared.config import resolve
from shared.errors import ConfigError, HeadraceError

# Many times the usual duration: a draft model given by its hub id may be downloaded meanwhile.
_CHECK_TIMEOUT_S = 300.0
# Settings of a worker that fit any model and machine, or are looked at here, and those that are ours.
ALWAYS_FIT = frozenset(
    {
        *("model", "served_model_name", "allow_revision_change", "allow_chat_template", "num_threads"),
        *("simulate", "simulate_growth", "nats_url", "nats_user", "nats_password", "nats_creds_file"),
        *("nats_nkey_seed_file", "nats_ca_file", "nats_cert_file", "nats_key_file", "health_host", "health_port"),
        *("golden", "golden_key_file", "golden_share", "golden_withdraw", "adapters"),
        *("drain_timeout_s", "audit_file", "log_format", "log_level", "request_log_per_s", "otlp_endpoint"),
    }
)


def check_parts(plan: Plan, console: Console, *, is_demo: bool) -> None:
    """Refuse settings with which the gateway or a worker could not start; the demo model with defaults needs no check.

    If a check itself fails, the console says so, and the parts are started anyway.

    Raises:
        HeadraceError: They could not; the message names the setting.
    """
    _check_gateway(plan)
    # One of each model.
    for environ in {spec.environ["HEADRACE_MODEL"]: spec.environ for spec in plan.workers}.values():
        settings = resolve(WorkerConfig, {}, environ)
        golden_baseline(settings, served_name(settings))
        looked_at = (field for field in dataclasses.fields(WorkerConfig) if field.name not in ALWAYS_FIT)
        is_chosen = any(getattr(settings, field.name) != field.default for field in looked_at)
        if is_chosen or not is_demo:
            _check_worker(environ, console)


def _check_gateway(plan: Plan) -> None:
    """Run the gateway's own checks; their imports take a moment, so only if a setting was chosen."""
    settings = resolve(GatewayConfig, {}, plan.gateway.environ)
    if plan.redis is not None:
        settings = dataclasses.replace(settings, redis_url=None)
    from gateway.process.settings_check import check_settings

    check_settings(settings)


def _check_worker(environ: Mapping[str, str], console: Console) -> None:
    """Check in a process of its own: its imports would stay in this one while the system runs."""
    done = _run_told([sys.executable, "-P", "-m", "gpu_worker.start.settings_check"], environ, console)
    if done is None:
        console.say("headrace", f"the worker's settings could not be checked within {_CHECK_TIMEOUT_S:g} s")
        return
    if done.returncode == EXIT_BAD_SETTINGS:
        told = msgspec.json.decode(done.stdout, type=SettingsProblem)
        raise HeadraceError(told.problem) if told.variable is None else ConfigError(told.variable, told.problem)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        console.say("headrace", f"the worker's settings could not be checked: {reason}")


def _run_told(
    command: list[str], environ: Mapping[str, str], console: Console
) -> subprocess.CompletedProcess[bytes] | None:
    """Return the finished check, or None after a timeout; report on the console while it takes long."""
    began, pipe = time.monotonic(), subprocess.PIPE
    with subprocess.Popen(
        tethered(command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
    ) as process:
        try:
            while (passed := time.monotonic() - began) < _CHECK_TIMEOUT_S:
                try:
                    output, errors = process.communicate(timeout=min(EVERY_S, _CHECK_TIMEOUT_S - passed))
                    return subprocess.CompletedProcess(command, process.returncode, output, errors)
                except subprocess.TimeoutExpired:
                    what = f"reading {environ['HEADRACE_MODEL']} and the settings"
                    console.say("headrace", f"{what} ({time.monotonic() - began:.0f} s)")
        finally:
            # Also after an interrupt, no process is left behind.
            process.kill()
    return None
