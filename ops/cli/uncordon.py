"""`headrace uncordon`: a worker that was cordoned takes requests again."""

from __future__ import annotations

import click

from ops.cli.options import settings_command
from ops.cli.worker_orders import OrderConfig, give_order


def run(config: OrderConfig, worker: str) -> int:
    """Let a cordoned worker take requests again.

    WORKER is the name that `headrace doctor` and the metrics show. Needs an administrator's credentials.
    """
    give_order(config, worker, b"uncordon")
    click.echo(f"{worker} takes requests")
    return 0


command = settings_command(OrderConfig, "uncordon", run, [click.Argument(["worker"])])
