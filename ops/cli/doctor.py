"""`headrace doctor`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ops.cli.options import as_given, settings_command
from ops.stack.config import DEFAULT_STATE_DIR
from ops.stack.servers import NATS_ROLES
from ops.stack.state import has_died, read_ready_file
from shared.config import setting
from shared.errors import ConfigError
from shared.nats_files import NatsFiles

if TYPE_CHECKING:
    from ops.doctor.finding import Finding
    from shared.nats_connection import Role


@dataclass(frozen=True, slots=True)
class DoctorConfig(NatsFiles):
    """What to look at besides the machine."""

    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up` to look at.")
    nats_url: str | None = setting(None, "NATS servers; those of the running `headrace up` if not given.")
    nats_user: str | None = setting(None, "NATS user; its role is looked at.")
    nats_password: str | None = setting(None, "Password of the NATS user.", secret=True)
    keys_file: Path | None = setting(None, "File with the API keys; that of the state directory if not given.")
    redis_url: str | None = setting(None, "Redis; that of the running `headrace up` if not given.", secret=True)
    files: str | None = setting(None, "Store of files of batches; that of the state directory if not given.")
    url: str | None = setting(None, "A gateway; that of the running `headrace up` if not given.")


def run(config: DoctorConfig) -> int:
    """Find problems of this installation, and how to fix them.

    Prints one page, without secrets, that can be pasted into an issue: versions, processor, GPU, compiler, memory,
    disk, settings, the key file, and NATS (rights, queue, clock, workers), Redis and a gateway if they
    are named or a `headrace up` runs. The exit status is 1 if a problem keeps Headrace from working.
    """
    from ops.doctor.finding import exit_code, page

    findings = list(_findings(config))
    print(page(findings, as_given))
    return exit_code(findings)


def _findings(config: DoctorConfig) -> Iterator[Finding]:
    from ops.doctor.finding import problem, unseen
    from ops.doctor.machine import machine_findings
    from ops.doctor.settings import file_findings, gateway_findings, key_findings, redis_finding, setting_findings

    def nowhere(topic: str, variable: str) -> Finding:
        text = f"no `headrace up` runs on {config.state_dir}, and {variable} is not given"
        return unseen(topic, text, f"give HEADRACE_STATE_DIR of one that runs, or {variable}")

    yield from machine_findings(config.state_dir, os.environ)
    yield from setting_findings({name: value for name, value in os.environ.items() if value})
    try:
        running = read_ready_file(config.state_dir)
    except ConfigError as error:
        running = None
        yield problem("state", str(error))
    if running is not None and has_died(config.state_dir, running):
        running = None
        told = f"the `headrace up` of {config.state_dir} was killed, with all its parts"
        yield problem("state", told, "start it anew")
    yield from key_findings(config.keys_file, config.state_dir)
    yield from file_findings(config.files, config.state_dir)
    nats_url = config.nats_url or (running.admin_nats_url if running else None)
    if nats_url:
        workers = running.pids.get("worker", []) if running and config.nats_url is None else []
        yield from _nats(config, nats_url, workers, is_own=config.nats_url is None)
    else:
        yield nowhere("nats", "HEADRACE_NATS_URL")
    redis_url = config.redis_url or (running.redis_url if running else None)
    yield asyncio.run(redis_finding(redis_url)) if redis_url or running else nowhere("redis", "HEADRACE_REDIS_URL")
    if url := config.url or (running and running.url):
        yield from gateway_findings(url)
    else:
        yield nowhere("gateway", "HEADRACE_URL")


def _nats(config: DoctorConfig, nats_url: str, workers: Sequence[int], *, is_own: bool) -> Iterator[Finding]:
    from ops.doctor.nats import NatsLogin, nats_findings
    from shared.subjects import served_by

    role = cast("Role", config.nats_user if config.nats_user in NATS_ROLES else "admin" if is_own else "worker")
    user, password = (None, None) if is_own else (config.nats_user, config.nats_password)
    model, worker = served_by(user) or (None, None)
    login = NatsLogin(nats_url, role, user, password, config, model, worker)
    yield from asyncio.run(nats_findings(login, workers=workers))


command = settings_command(DoctorConfig, "doctor", run)
