"""`headrace drain`: a worker takes no more requests, finishes what it has, and ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ops.cli.admin import admin_client
from ops.cli.options import settings_command
from ops.cli.running_system import find_admin_nats
from ops.cli.worker_orders import ANSWER_S, HeardWorkers, OrderConfig, order
from shared.audit import audited, nats_login
from shared.config import setting
from shared.errors import DependencyError

if TYPE_CHECKING:
    from nats.aio.client import Client

    from shared.messages import Heartbeat

_SILENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class DrainConfig(OrderConfig):
    """Where the worker is heard, and how long to wait for it."""

    wait: bool = setting(True, "Wait until the worker has ended.")
    timeout_s: float = setting(120.0, "How long to wait for that.", minimum=0.1)


def run(config: DrainConfig, worker: str) -> int:
    """Drain a worker: it hands over what it has, and ends.

    It takes no more requests, finishes what it can, and hands the rest to others. WORKER is the name that `headrace
    doctor` and the metrics show. What it cannot finish within its --drain-timeout-s goes on at other workers, with
    the same text. Whatever supervises the worker may start it anew: `headrace up` and Kubernetes do, systemd does
    not. Needs an administrator's credentials.
    """
    url = find_admin_nats(config.nats_url, config.state_dir)
    user = nats_login(config.nats_user, url, config)
    with audited(config.audit_log, "worker.drain", nats_user=user, worker=worker):
        asyncio.run(_drain(config, url, worker))
    return 0


async def _drain(config: DrainConfig, url: str, worker: str) -> None:
    async with admin_client(url, "headrace-drain", config, ANSWER_S) as client:
        fleet = HeardWorkers(worker)
        beat = await fleet.find(client, "drain", "drains on SIGTERM")
        await order(client, worker, b"")
        click.echo(f"{worker} drains: {beat.running} running, {beat.waiting} waiting")
        if config.wait:
            await _wait(client, fleet, beat, config.timeout_s)


async def _wait(client: Client, fleet: HeardWorkers, first: Heartbeat, timeout_s: float) -> None:
    """Wait until nothing more is heard of this life of the worker."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() - fleet.heard_at < _SILENCE_S or not client.is_connected:
        if fleet.beat is not None and fleet.beat.started != first.started:
            break  # started anew
        if time.monotonic() > deadline:
            running = 0 if fleet.beat is None else fleet.beat.running
            raise DependencyError(f"{first.worker} has not ended after {timeout_s:g} s: {running} sequences run")
        await asyncio.sleep(0.1)
    click.echo(f"{first.worker} has ended")


command = settings_command(DrainConfig, "drain", run, [click.Argument(["worker"])])
